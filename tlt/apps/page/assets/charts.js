"use strict";
(() => {
  // ── a chart is drawn when it comes into view ──
  const items = JSON.parse(document.getElementById("chart-data").textContent);
  const views = new Map(), ranges = new Map();
  const together = (name, range) => {
    const group = ranges.get(name) ?? { ranges: [], isMoving: false };
    ranges.set(name, group);
    if (group.ranges.length) range.setv({ start: group.ranges[0].start, end: group.ranges[0].end });
    group.ranges.push(range);
    range.change.connect(() => {
      if (group.isMoving) return;
      group.isMoving = true;
      for (const other of group.ranges) if (other !== range) other.setv({ start: range.start, end: range.end });
      group.isMoving = false;
    });
  };
  const draw = (id) => {
    if (!views.has(id)) {
      views.set(id, Bokeh.embed.embed_item(items[id].item, `plot-${id}`).then(([view]) => {
        if (items[id].together) together(items[id].together, view.model.x_range);
        document.getElementById(`plot-${id}`).dataset.drawn = "";
        return view.model;
      }));
    }
    return views.get(id);
  };
  const plots = document.querySelectorAll("[data-plot]");
  const watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watcher.unobserve(target);
      draw(target.dataset.plot);
    }
  }, { rootMargin: "300px" });
  plots.forEach((plot) => watcher.observe(plot));
  document.getElementById("draw-all").addEventListener("click", () => plots.forEach((plot) => draw(plot.dataset.plot)));

  // ── legends hide and show what they name ──
  document.querySelectorAll(".legend button").forEach((button) => button.addEventListener("click", async () => {
    const isShown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(isShown));
    const plot = await draw(button.closest("figure").id);
    for (const name of JSON.parse(button.dataset.models)) plot.document.get_model_by_name(name).visible = isShown;
  }));

  // ── chosen steps ──
  const choice = document.getElementById("step-choice");
  choice?.addEventListener("change", () => {
    document.querySelectorAll(".panel").forEach((panel) => { panel.hidden = panel.id !== choice.value; });
  });
})();
