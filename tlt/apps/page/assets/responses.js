"use strict";
(() => {
  // Foreign text enters the page as text alone.
  const data = JSON.parse(document.getElementById("response-data").textContent);
  const place = document.getElementById("response-table");
  const make = (name, text, className) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  const several = (key) => new Set(data.map((row) => row[key])).size > 1;
  const rounded = (value) => String(Math.round(value * 1e4) / 1e4);
  const shown = (row, key) => {
    const value = row[key];
    if (value === null || value === undefined) return "–";
    if (typeof value === "boolean") return value ? "yes" : "no";
    return key === "reward" || key === "scatter" ? rounded(value) : String(value);
  };

  // ── tokens, coloured by who drafted them ──
  const legend = document.getElementById("drafters");
  legend.hidden = !data.some((row) => (row.parts ?? [row]).some((part) => part.drafts && part.drafts.length));
  const nameOf = (drafter) => legend.querySelector(`[data-drafter="${CSS.escape(drafter)}"]`)?.textContent ?? drafter;
  const coloured = (row) => {
    const pre = make("pre"), text = Array.from(row.text), drafterOf = new Map(), rejectedAt = new Map();
    for (const [first, drafter, drafted, accepted, rejected] of row.drafts) {
      for (let token = first; token < Math.min(first + accepted, row.tokens); token += 1) drafterOf.set(token, drafter);
      if (rejected !== null) rejectedAt.set(first + accepted, [drafted - accepted, drafted, drafter, rejected]);
    }
    let end = 0;
    row.stretches.forEach(([first, lengths], number) => {
      const start = number ? text.length - lengths.reduce((sum, length) => sum + length, 0) : 0;
      if (start > end) pre.append(text.slice(end, start).join(""));
      end = start;
      lengths.forEach((length, place) => {
        const token = make("span", text.slice(end, end + length).join(""), "token");
        const drafter = drafterOf.get(first + place) ?? "", rejection = rejectedAt.get(first + place);
        token.dataset.drafter = drafter;
        token.title = `token ${first + place + 1}: ${drafter ? `drafted by the ${nameOf(drafter)}` : "not drafted"}`;
        if (rejection) {
          const [num, drafted, by, instead] = rejection;
          token.dataset.rejected = num;
          token.title += `; rejected here: ${num} of ${drafted} tokens of the ${nameOf(by)}, the first ${JSON.stringify(instead)}`;
        }
        pre.append(token);
        end += length;
      });
    });
    return pre;
  };

  // ── one response, and a group of them side by side ──
  const turnOf = (part) => {
    const turn = make("div", undefined, "turn");
    turn.dataset.by = part.by;
    turn.append(make("div", part.label, "label"), part.stretches ? coloured(part) : make("pre", part.text));
    return turn;
  };
  const read = (row) => {
    const parts = [];
    if (row.parts) {
      parts.push(make("div", row.told, "label"));
      if (row.drafted) parts.push(make("div", row.drafted, "label"));
      parts.push(...row.parts.map(turnOf));
    } else if (row.drafted) parts.push(make("div", row.drafted, "label"), coloured(row));
    else parts.push(make("pre", row.text));
    if (row.error) parts.push(make("div", "why it has no score", "label"), make("pre", row.error));
    return parts;
  };
  const short = (text) => text.slice(0, 70).replace(/\s+/g, " ") || "(empty)";
  const opened = (title, fill) => {
    const details = make("details");
    details.append(make("summary", title));
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(...fill());
    });
    return details;
  };
  const ofOne = (row) => opened(short(row.text),
    () => [make("div", "prompt", "label"), make("pre", row.prompt), make("div", "response", "label"), ...read(row)]);
  const ofGroup = (group) => opened(short(group.rows[0].prompt), () => {
    const cards = make("div", undefined, "cards");
    for (const row of group.rows) {
      const card = make("div", undefined, "card");
      const solved = row.solved ? "solved" : "not solved";
      card.append(make("div", `sample ${row.sample}: reward ${shown(row, "reward")}, ${solved}, ${row.tokens} tokens, ${row.finish}`, "label"));
      card.append(...read(row));
      cards.append(card);
    }
    return [make("div", "prompt", "label"), make("pre", group.rows[0].prompt), cards];
  });
  const toGroups = (rows) => {
    const groups = new Map();
    for (const row of rows) {
      const key = JSON.stringify([row.run, row.purpose, row.step, row.problem]);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(row);
    }
    return [...groups.values()].map((members) => {
      const rewards = members.map((row) => row.reward).filter((value) => typeof value === "number");
      const mean = rewards.length ? rewards.reduce((sum, value) => sum + value, 0) / rewards.length : null;
      const { run, purpose, step, problem } = members[0];
      return {
        run, purpose, step, problem, rows: members, sample: members.length, reward: mean,
        scatter: mean === null ? null : Math.sqrt(rewards.reduce((sum, value) => sum + (value - mean) ** 2, 0) / rewards.length),
        solved: members.filter((row) => row.solved).length, tokens: Math.max(...members.map((row) => row.tokens)),
      };
    });
  };
  const head = [["run", "run"], ["step", "step"], ["purpose", "kind"], ["problem", "problem"]].filter(([key]) => key !== "run" || several("run"));
  const views = {
    responses: { columns: [...head, ["sample", "sample"], ["reward", "reward"], ["solved", "solved"], ["tokens", "tokens"],
      ...(data.some((row) => row.parts) ? [["turns", "turns"]] : []), ["finish", "ended by"], ["text", "prompt and response"]], rows: (rows) => [...rows], text: ofOne },
    groups: { columns: [...head, ["sample", "responses"], ["reward", "mean reward"], ["scatter", "std"], ["solved", "solved"],
      ["tokens", "longest"], ["text", "prompt and its responses"]], rows: toGroups, text: ofGroup },
  };
  const names = new Set(["run", "purpose", "problem", "finish"]);

  // ── filters ──
  const PER_PAGE = 50;
  const form = make("form", undefined, "filters");
  form.addEventListener("submit", (event) => event.preventDefault());
  const field = (label, element, name) => {
    const wrapped = make("label", `${label} `);
    element.name = name;
    wrapped.append(element);
    form.append(wrapped);
    element.addEventListener("input", () => fill());
    return element;
  };
  const select = (options) => {
    const element = make("select");
    for (const [value, text] of options) {
      const option = make("option", text);
      option.value = value;
      element.append(option);
    }
    return element;
  };
  const values = (key) => [...new Set(data.map((row) => row[key]))];
  const choices = (key) => [["", "all"], ...values(key).sort((a, b) => a - b || String(a).localeCompare(String(b))).map((value) => [String(value), String(value)])];
  const numeric = () => Object.assign(make("input"), { type: "number", min: "0", step: "1" });
  const count = make("span", "", "label"), table = make("table"), more = make("button", "show all");
  let sorted = { key: "step", up: false }, isWhole = false;
  const number = (element) => (element.value === "" ? null : Number(element.value));

  function fill() {
    const view = views[controls.view.value];
    const words = controls.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const [least, most] = [number(controls.least), number(controls.most)];
    const kept = data.filter((row) => words.every((word) => `${row.prompt}\n${row.text}\n${row.problem}`.toLowerCase().includes(word))
      && (controls.solved.value === "" || row.solved === (controls.solved.value === "yes"))
      && ["run", "purpose", "step"].every((key) => !controls[key] || controls[key].value === "" || String(row[key]) === controls[key].value)
      && (least === null || row.tokens >= least) && (most === null || row.tokens <= most));
    const rows = view.rows(kept), sign = sorted.up ? 1 : -1;
    rows.sort((a, b) => {
      const [x, y] = [a[sorted.key], b[sorted.key]];
      if (x === y) return 0;
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
    });
    const heads = make("tr"), body = make("tbody"), top = make("thead");
    for (const [key, text] of view.columns) {
      const cell = make("th"), button = make("button", text);
      cell.scope = "col";
      if (names.has(key)) cell.className = "name";
      cell.setAttribute("aria-sort", key === sorted.key ? (sorted.up ? "ascending" : "descending") : "none");
      button.type = "button";
      button.addEventListener("click", () => { sorted = { key, up: sorted.key === key ? !sorted.up : true }; fill(); });
      cell.append(button);
      heads.append(cell);
    }
    top.append(heads);
    for (const row of isWhole ? rows : rows.slice(0, PER_PAGE)) {
      const line = make("tr");
      for (const [key, text] of view.columns) {
        const cell = make("td", key === "text" ? undefined : shown(row, key), key === "text" ? "text" : names.has(key) ? "name" : "");
        cell.dataset.head = text;
        if (key === "text") cell.append(view.text(row));
        line.append(cell);
      }
      body.append(line);
    }
    table.replaceChildren(make("caption", "Click on a head to sort, on a response to read it."), top, body);
    count.textContent = ` ${kept.length} of ${data.length} responses${rows === kept || view === views.responses ? "" : ` in ${rows.length} groups`}`;
    more.hidden = isWhole || rows.length <= PER_PAGE;
    more.textContent = `show all ${rows.length}`;
  }
  const controls = {};
  if (data.length) {
    controls.view = field("show", select([["responses", "responses"], ["groups", "groups"]]), "view");
    const search = Object.assign(make("input"), { type: "search", placeholder: "words of prompt, response or problem" });
    controls.text = field("text", search, "text");
    controls.solved = field("solved", select([["", "all"], ["yes", "yes"], ["no", "no"]]), "solved");
    if (several("run")) controls.run = field("run", select(choices("run")), "run");
    controls.purpose = field("kind", select(choices("purpose")), "purpose");
    controls.step = field("step", select(choices("step")), "step");
    controls.least = field("tokens from", numeric(), "least");
    controls.most = field("to", numeric(), "most");
    form.append(count);
    more.type = "button";
    more.addEventListener("click", () => { isWhole = true; fill(); });
    place.append(form, table, more);
    fill();
  }
})();
