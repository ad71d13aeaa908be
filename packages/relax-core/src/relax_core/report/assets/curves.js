// The curves of metrics, and the stacked times of phases.

const COLORS = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)", "var(--c7)", "var(--c8)"];
const DASHES = ["", "6 4", "2 3", "9 3 2 3"];
const state = { smoothing: 0 };

const path = (points, x, y) => {
  let pen = "M";
  return points
    .map(([px, py]) => {
      if (!Number.isFinite(py)) {
        pen = "M";
        return "";
      }
      const command = `${pen}${x(px).toFixed(1)} ${y(py).toFixed(1)}`;
      pen = "L";
      return command;
    })
    .join("");
};

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low > high ? [0, 1] : [low, high];
}

const unionOfSteps = (series) =>
  [...new Set(series.flatMap(({ points }) => points.map(([step]) => step)))].sort((a, b) => a - b);

// The metrics of one group over all runs: color tells runs apart, or metrics where there is one run.
function curveChart(group, all, runs) {
  const metrics = all.filter(({ name }) => runs.some((run) => run.metrics.some((record) => name in record)));
  const series = [];
  metrics.forEach((metric, m) => {
    runs.forEach((run, r) => {
      const points = run.metrics
        .filter((record) => metric.name in record)
        .map((record) => [record.step, toNumber(record[metric.name])]);
      if (!points.length) return;
      const many = runs.length > 1;
      const name = metrics.length > 1 || !many ? metric.label : "";
      series.push({
        label: many ? [run.label, name].filter(Boolean).join(": ") : name,
        color: COLORS[(many ? r : series.length) % COLORS.length],
        dash: many ? DASHES[m % DASHES.length] : "",
        points,
        unit: metric.unit,
        sparse: points.length < run.metrics.length / 2 || points.length < 3,
      });
    });
  });
  if (!series.length) return null;
  const steps = unionOfSteps(series);
  const shown = ({ points, sparse }) => (state.smoothing && !sparse ? smooth(points, state.smoothing) : points);
  return makeChart({
    title: group,
    unit: new Set(series.map((one) => one.unit)).size === 1 ? series[0].unit : "",
    doc: metrics.map((metric) => `${metric.label}: ${metric.doc}`).join("\n"),
    summary: series
      .map(({ label, points }) => `${label} from ${format(points[0][1])} to ${format(points.at(-1)[1])}.`)
      .join(" "),
    steps,
    xRange: [steps[0], steps.at(-1)],
    yRange: () => {
      const [low, high] = extent(series.flatMap((one) => shown(one).map(([, value]) => value)));
      const air = (high - low) * 0.06;
      return [low >= 0 && low - air < 0 ? 0 : low - air, high + air];
    },
    draw: (x, y) =>
      series.flatMap((one) => {
        const style = { stroke: one.color, "stroke-dasharray": one.dash, class: "curve", "data-label": one.label };
        const dots = one.sparse
          ? one.points
              .filter(([, value]) => Number.isFinite(value))
              .map(([step, value]) => svg("circle", { cx: x(step), cy: y(value), r: 3.5, fill: one.color }))
          : [];
        const faint = state.smoothing && !one.sparse
          ? [svg("path", { ...style, class: "curve faint", d: path(one.points, x, y) })]
          : [];
        return [...faint, svg("path", { ...style, d: path(shown(one), x, y) }), ...dots];
      }),
    rowsAt: (step) =>
      series.flatMap(({ label, color, points }) => {
        const found = points.find(([at]) => at === step);
        return found ? [[label, format(found[1]), color]] : [];
      }),
    legend: html(
      "ul",
      { class: "legend" },
      series.map(({ label, color, dash }) => html("li", {}, swatch(color, dash), label)),
    ),
  });
}

// Seconds of each phase, stacked; what no phase claims is "other".
function phaseChart(run, phases, many) {
  const records = run.metrics.filter((record) => record.time && record.time.phases);
  if (!records.length) return null;
  const known = [...phases, ...new Set(records.flatMap((record) => Object.keys(record.time.phases)))];
  const rows = records.map((record) => {
    const spent = Object.values(record.time.phases).reduce((sum, value) => sum + toNumber(value), 0);
    const other = Math.max(0, toNumber(record.time.total) - spent) || 0;
    return { step: record.step, seconds: { ...record.time.phases, other } };
  });
  const names = [...new Set(known), "other"].filter((name) => rows.some((row) => row.seconds[name] > 0));
  if (!names.length) return null;
  const totals = Object.fromEntries(
    names.map((name) => [name, rows.reduce((sum, row) => sum + (toNumber(row.seconds[name]) || 0), 0)]),
  );
  const all = Object.values(totals).reduce((sum, value) => sum + value, 0) || 1;
  const color = (name) => (name === "other" ? "var(--grey)" : COLORS[known.indexOf(name) % COLORS.length]);
  const steps = rows.map((row) => row.step);
  const stacks = rows.map((row) => {
    let top = 0;
    return names.map((name) => [top, (top += toNumber(row.seconds[name]) || 0)]);
  });
  return makeChart({
    title: many ? `time by phase: ${run.label}` : "time by phase",
    className: "wide",
    unit: "seconds a step",
    doc: "Seconds of each step by phase.",
    summary: names.map((name) => `${name} ${Math.round((100 * totals[name]) / all)} %.`).join(" "),
    steps,
    xRange: [steps[0] - 0.5, steps.at(-1) + 0.5],
    yRange: () => [0, extent(stacks.map((stack) => stack.at(-1)[1]))[1] * 1.05],
    draw: (x, y) =>
      names.map((name, i) => {
        const half = Math.max(0.5, (x(1) - x(0)) * 0.42);
        const bar = ([low, high], at) =>
          `M${(x(at) - half).toFixed(1)} ${y(low).toFixed(1)}V${y(high).toFixed(1)}` +
          `H${(x(at) + half).toFixed(1)}V${y(low).toFixed(1)}Z`;
        const d = rows.map((row, r) => bar(stacks[r][i], row.step)).join("");
        return svg("path", { class: "area", fill: color(name), d, "data-label": name });
      }),
    rowsAt: (step) => {
      const row = rows.find((candidate) => candidate.step === step);
      return row ? names.map((name) => [name, duration(toNumber(row.seconds[name]) || 0), color(name)]) : [];
    },
    legend: html(
      "ul",
      { class: "legend" },
      names.map((name) =>
        html("li", {}, swatch(color(name)), `${name} ${Math.round((100 * totals[name]) / all)} %`),
      ),
    ),
  });
}
