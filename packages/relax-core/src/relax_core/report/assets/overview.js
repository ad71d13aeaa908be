// What came out: the summary of each run, and the settings in which runs differ.

const FACTS = [
  ["Held out", (s) => change(s.eval_before, s.eval_after, s.eval_metric), "before → after"],
  ["Reward", (s) => change(s.reward_first, s.reward_last), "first → last 10 %"],
  ["Steps", (s) => known(s.steps, String)],
  ["Wall time", (s) => known(s.wall_s, duration)],
  ["Training", (s) => known(s.train_tokens_per_s, format, "tokens/s")],
  ["Sampling", (s) => known(s.rollout_tokens_per_s, format, "tokens/s")],
  ["Weight update", (s) => known(s.update_exposed_s, format, "s of a step exposed")],
  ["Peak memory", (s) => known(s.peak_rss_gib, format, "GiB")],
  ["Largest log-prob gap", (s) => known(s.logprob_gap_max, format, "nats")],
  ["Seed", (s) => known(s.seed, String)],
];

function known(value, show, unit = "") {
  if (value === undefined || value === null) return null;
  return [`${show(typeof value === "string" ? toNumber(value) : value)}`, unit];
}

function change(before, after, what = "") {
  if (after === undefined || after === null) return null;
  const from = before === undefined || before === null ? "" : `${format(toNumber(before), 3)} → `;
  return [`${from}${format(toNumber(after), 3)}`, what || ""];
}

// A run that is not finished has no summary: its metrics tell as much.
function summaryOf(run) {
  if (Object.keys(run.summary).length) return run.summary;
  const last = run.metrics.at(-1);
  const values = (name) => run.metrics.filter((record) => name in record).map((record) => record[name]);
  const metric = ["accuracy", "reward", "loss"].find((name) => values(`eval_${name}`).length);
  return {
    eval_metric: metric,
    eval_before: run.metrics[0].step === 0 ? run.metrics[0][`eval_${metric}`] : undefined,
    eval_after: values(`eval_${metric}`).at(-1),
    reward_first: values("reward")[0],
    reward_last: values("reward").at(-1),
    steps: last.step,
    wall_s: last.time && last.time.elapsed,
  };
}

function overviewSection(runs) {
  const section = html("section", { "aria-label": "Overview" });
  const many = runs.length > 1;
  if (!many) {
    const summary = summaryOf(runs[0]);
    const cards = FACTS.map(([label, fact, note]) => [label, fact(summary), note]).filter(([, value]) => value);
    section.append(
      html(
        "dl",
        { class: "facts" },
        cards.map(([label, [value, unit], note]) =>
          html(
            "div",
            { class: "card fact" },
            html("dt", {}, label),
            html("dd", {}, html("b", {}, value), unit ? html("span", { class: "unit" }, ` ${unit}`) : null),
            note ? html("span", { class: "quiet" }, note) : null,
          ),
        ),
      ),
    );
    return section;
  }
  const summaries = runs.map(summaryOf);
  const rows = FACTS.map(([label, fact]) => [label, summaries.map(fact)]).filter(([, all]) => all.some(Boolean));
  section.append(comparison(runHeads(runs), rows.map(([label, all]) => [label, all.map((fact) => (fact ? fact.join(" ") : "–"))])));
  return section;
}

// A table with a column for each run; rows are [label, cells].
function comparison(head, rows) {
  return html(
    "div",
    { class: "table-box" },
    html(
      "table",
      { class: "compare" },
      head ? html("thead", {}, html("tr", {}, html("td"), head)) : null,
      html(
        "tbody",
        {},
        rows.map(([label, cells]) =>
          html("tr", {}, html("th", { scope: "row" }, label), cells.map((cell) => html("td", {}, cell))),
        ),
      ),
    ),
  );
}

const runHeads = (runs) =>
  runs.map((run, i) => html("th", { scope: "col" }, swatch(COLORS[i % COLORS.length], ""), ` ${run.label}`));

function settingsSection(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  const many = runs.length > 1;
  const rows = names.filter((name) => !many || new Set(runs.map((run) => run.config[name])).size > 1);
  const title = many ? `Settings that differ (${rows.length})` : `Settings (${rows.length})`;
  if (!names.length) return null;
  return html(
    "details",
    { class: "card settings", open: many },
    html("summary", {}, title),
    comparison(
      many ? runHeads(runs) : null,
      rows.map((name) => [name, runs.map((run) => (run.config[name] === undefined ? "–" : run.config[name]))]),
    ),
  );
}
