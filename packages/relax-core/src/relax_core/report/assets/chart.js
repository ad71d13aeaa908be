// One chart: axes, a cursor that all charts share, and a drawing that its kind brings along.

const HEIGHT = 220;
const MARGIN = { top: 10, right: 14, bottom: 24, left: 52 };
const cursor = { step: null, charts: [] };

function moveCursor(step, active) {
  cursor.step = step;
  for (const chart of cursor.charts) chart.showCursor(step, chart === active);
}

// `kind` gives: title, unit, doc, summary, steps (sorted), xRange, yRange(), draw(x, y), rowsAt(step), legend.
function makeChart(kind) {
  const picture = svg("svg", { class: "plot", height: HEIGHT, "aria-hidden": "true" });
  const tip = html("div", { class: "tip", hidden: true });
  const plot = html(
    "div",
    {
      class: "plot-box",
      tabindex: "0",
      role: "group",
      "aria-roledescription": "chart",
      "aria-label": `${kind.title}: ${kind.summary} Use the left and right arrow keys to read values.`,
    },
    picture,
    tip,
  );
  const live = html("p", { class: "for-readers", "aria-live": "polite" });
  const card = html(
    "figure",
    { class: `card chart ${kind.className || ""}`, "data-chart": kind.title },
    html("figcaption", { title: kind.doc }, html("h3", {}, kind.title), html("span", { class: "unit" }, kind.unit || "")),
    plot,
    kind.legend,
    live,
  );
  const chart = { card, showCursor, redraw };
  const number = cursor.charts.length;
  let x = null;
  let line = null;

  function redraw() {
    const width = Math.max(240, plot.clientWidth || 420);
    picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    picture.setAttribute("width", width);
    const [low, high] = kind.yRange();
    const y = axis(low, high, HEIGHT - MARGIN.bottom, MARGIN.top);
    x = axis(...kind.xRange, MARGIN.left, width - MARGIN.right);
    const grid = svg("g", { class: "grid" });
    for (const value of ticks(y.low, y.high, 5)) {
      grid.append(
        svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
        svg("text", { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, format(value)),
      );
    }
    for (const value of ticks(x.low, x.high, width / 90, true)) {
      grid.append(svg("text", { x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, String(value)));
    }
    line = svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
    const [inner, area] = [`inside-${number}`, { x: MARGIN.left - 5, y: MARGIN.top - 5 }];
    const frame = { ...area, width: width - MARGIN.right + 5 - area.x, height: HEIGHT - MARGIN.bottom + 5 - area.y };
    picture.replaceChildren(
      svg("defs", {}, svg("clipPath", { id: inner }, svg("rect", frame))),
      grid,
      svg("g", { "clip-path": `url(#${inner})` }, ...kind.draw(x, y)),
      line,
    );
    showCursor(cursor.step, false);
  }

  function showCursor(step, active) {
    const inside = step !== null && step >= x.low && step <= x.high;
    line.setAttribute("visibility", inside ? "visible" : "hidden");
    tip.hidden = !(inside && active);
    if (!inside) return;
    line.setAttribute("x1", x(step));
    line.setAttribute("x2", x(step));
    if (!active) return;
    const rows = kind.rowsAt(step);
    tip.replaceChildren(
      html("b", {}, `step ${step}`),
      ...rows.map(([label, value, color]) =>
        html("div", { class: "tip-row" }, swatch(color), html("span", {}, label), html("b", {}, value)),
      ),
    );
    const left = x(step) > plot.clientWidth / 2;
    Object.assign(tip.style, left
      ? { right: `${plot.clientWidth - x(step) + 10}px`, left: "auto" }
      : { left: `${x(step) + 10}px`, right: "auto" });
    live.textContent = `step ${step}: ${rows.map(([label, value]) => `${label} ${value}`).join(", ")}`;
  }

  const nearest = (target) =>
    kind.steps.reduce((best, step) => (Math.abs(step - target) < Math.abs(best - target) ? step : best), kind.steps[0]);
  plot.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    moveCursor(nearest(x.invert(event.clientX - box.left)), chart);
  });
  plot.addEventListener("pointerleave", () => moveCursor(null, chart));
  plot.addEventListener("blur", () => moveCursor(null, chart));
  plot.addEventListener("keydown", (event) => {
    const last = kind.steps.length - 1;
    const at = kind.steps.indexOf(cursor.step);
    const target = {
      ArrowLeft: at < 0 ? last : Math.max(0, at - 1),
      ArrowRight: at < 0 ? 0 : Math.min(last, at + 1),
      Home: 0,
      End: last,
    }[event.key];
    if (event.key === "Escape") moveCursor(null, chart);
    else if (target === undefined) return;
    else moveCursor(kind.steps[target], chart);
    event.preventDefault();
  });
  cursor.charts.push(chart);
  new ResizeObserver(redraw).observe(plot);
  redraw();
  return chart;
}

const swatch = (color, dash) =>
  svg(
    "svg",
    { class: "swatch", width: 18, height: 10, "aria-hidden": "true" },
    dash === undefined
      ? svg("rect", { width: 10, height: 10, x: 4, rx: 2, fill: color })
      : svg("line", { x1: 0, x2: 18, y1: 5, y2: 5, stroke: color, "stroke-width": 2.5, "stroke-dasharray": dash }),
  );
