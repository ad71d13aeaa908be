// Puts the page together.

const report = JSON.parse(document.getElementById("data").textContent);
const { runs } = report;

function themeButton() {
  const dark = () =>
    (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const button = html("button", {
    type: "button",
    class: "theme",
    onclick: () => {
      document.documentElement.dataset.theme = dark() ? "light" : "dark";
      name();
    },
  });
  const name = () => (button.textContent = dark() ? "Light" : "Dark");
  name();
  return button;
}

function smoothingSlider() {
  const shown = html("output", {}, "off");
  const slider = html("input", {
    type: "range",
    min: 0,
    max: 0.95,
    step: 0.05,
    value: 0,
    name: "smoothing",
    oninput: () => {
      state.smoothing = Number(slider.value);
      shown.textContent = state.smoothing ? slider.value : "off";
      for (const chart of cursor.charts) chart.redraw();
    },
  });
  return html("label", { class: "slider" }, html("span", {}, "Smoothing"), slider, shown);
}

const groups = new Map();
for (const metric of report.metrics) {
  if (!groups.has(metric.group)) groups.set(metric.group, []);
  groups.get(metric.group).push(metric);
}
const ORDER = ["accuracy", "reward", "loss", "entropy", "KL", "log-prob gap", "response length", "MTP loss", "MTP acceptance"];
const rank = (group) => (ORDER.indexOf(group) + ORDER.length + 1) % (ORDER.length + 1);
const names = [...groups.keys()].sort((a, b) => rank(a) - rank(b));

const charts = html("div", { class: "charts" });
document.body.append(
  html(
    "header",
    {},
    html("h1", {}, "Relax", html("span", {}, runs.map((run) => run.label).join(" · "))),
    html("div", { class: "tools" }, smoothingSlider(), themeButton()),
  ),
  html(
    "main",
    {},
    overviewSection(runs),
    alertsSection(runs) || "",
    html("section", { "aria-labelledby": "curves-head" }, html("h2", { id: "curves-head" }, "Curves"), charts),
    draftSection(runs) || "",
    valuesSection(runs, report.metrics),
    samplesSection(runs),
    settingsSection(runs) || "",
  ),
);
// Charts measure their place, so they come after the page stands.
const drawn = [
  ...names.map((group) => curveChart(group, groups.get(group), runs)),
  ...runs.map((run) => phaseChart(run, report.phases, runs.length > 1)),
];
charts.append(...drawn.filter(Boolean).map((chart) => chart.card));
