"use strict";
(() => {
  // ── legends hide and show what they name ──
  document.querySelectorAll(".legend button").forEach((button) => button.addEventListener("click", () => {
    const isShown = button.getAttribute("aria-pressed") !== "true";
    for (const name of JSON.parse(button.dataset.models)) Bokeh.documents[0].get_model_by_name(name).visible = isShown;
    button.setAttribute("aria-pressed", String(isShown));
  }));

  // ── chosen steps ──
  const choice = document.getElementById("step-choice");
  if (choice) {
    const show = () => document.querySelectorAll(".panel").forEach((panel) => { panel.hidden = panel.id !== choice.value; });
    choice.addEventListener("change", show);
    window.addEventListener("load", () => setTimeout(show, 0)); // plots are measured before they are hidden
  }

  // ── responses: foreign text enters the page as text alone ──
  const data = JSON.parse(document.getElementById("response-data").textContent);
  const place = document.getElementById("response-table");
  const make = (name, text, className) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  const columns = [["run", "run"], ["step", "step"], ["purpose", "kind"], ["problem", "problem"], ["sample", "sample"],
    ["reward", "reward"], ["solved", "solved"], ["tokens", "tokens"], ["finish", "ended by"], ["text", "prompt and response"]]
    .filter(([key]) => key !== "run" || new Set(data.map((row) => row.run)).size > 1);
  const names = new Set(["run", "purpose", "problem", "finish"]);
  const shown = (row, key) => {
    const value = row[key];
    if (value === null || value === undefined) return "–";
    if (typeof value === "boolean") return value ? "yes" : "no";
    return key === "reward" ? String(Math.round(value * 1e4) / 1e4) : String(value);
  };
  // ── tokens, coloured by who drafted them ──
  const legend = document.getElementById("drafters");
  legend.hidden = !data.some((row) => row.drafts && row.drafts.length);
  const nameOf = (drafter) => legend.querySelector(`[data-drafter="${CSS.escape(drafter)}"]`)?.textContent ?? drafter;
  const coloured = (row) => {
    const pre = make("pre"), text = Array.from(row.text), drafterOf = new Map(), rejectedAt = new Map();
    for (const [first, drafter, drafted, accepted, rejected] of row.drafts) {
      for (let token = first; token < first + accepted; token += 1) drafterOf.set(token, drafter);
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
  const toRow = (row) => {
    const line = make("tr");
    for (const [key] of columns) {
      const isText = key === "text";
      const cell = make("td", isText ? undefined : shown(row, key), isText ? "text" : names.has(key) ? "name" : "");
      if (isText) {
        const details = make("details");
        details.append(make("summary", row.text.slice(0, 70).replace(/\s+/g, " ") || "(empty)"));
        details.addEventListener("toggle", () => {
          if (!details.open || details.children.length > 1) return;
          details.append(make("div", "prompt", "label"), make("pre", row.prompt), make("div", "response", "label"));
          if (row.drafted) details.append(make("div", row.drafted, "label"), coloured(row));
          else details.append(make("pre", row.text));
          if (row.error) details.append(make("div", "why it has no score", "label"), make("pre", row.error));
        });
        cell.append(details);
      }
      line.append(cell);
    }
    return line;
  };
  if (data.length) {
    const search = make("input"), count = make("span", "", "label"), table = make("table"), head = make("thead"), body = make("tbody");
    const label = make("label", "Search prompts, responses and problems: ");
    search.type = "search";
    label.append(search);
    let sorted = { key: "step", up: false };
    const fill = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const rows = data.filter((row) => words.every((word) => `${row.prompt}\n${row.text}\n${row.problem}`.toLowerCase().includes(word)));
      const sign = sorted.up ? 1 : -1;
      rows.sort((a, b) => {
        const [x, y] = [a[sorted.key], b[sorted.key]];
        if (x === y) return 0;
        if (x === null) return 1;
        if (y === null) return -1;
        return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
      });
      body.replaceChildren(...rows.map(toRow));
      count.textContent = ` ${rows.length} of ${data.length} shown`;
      head.querySelectorAll("th").forEach((cell) => cell.setAttribute("aria-sort",
        cell.dataset.key === sorted.key ? (sorted.up ? "ascending" : "descending") : "none"));
    };
    const heads = make("tr");
    for (const [key, text] of columns) {
      const cell = make("th"), button = make("button", text);
      cell.scope = "col";
      if (names.has(key)) cell.className = "name";
      cell.dataset.key = key;
      button.type = "button";
      button.addEventListener("click", () => { sorted = { key, up: sorted.key === key ? !sorted.up : true }; fill(); });
      cell.append(button);
      heads.append(cell);
    }
    head.append(heads);
    table.append(make("caption", "Click on a head to sort, on a response to read it."), head, body);
    const wide = make("div", undefined, "wide");
    wide.append(table);
    place.append(label, count, wide);
    search.addEventListener("input", fill);
    fill();
  }

  // ── a run that is watched ──
  const stamp = document.documentElement.dataset.watch;
  if (stamp !== undefined) {
    setInterval(async () => {
      try {
        const answer = await fetch("/stamp");
        if (answer.ok && (await answer.text()) !== stamp) location.reload();
      } catch { /* the server has gone: the page stays as it is */ }
    }, 3000);
  }
})();
