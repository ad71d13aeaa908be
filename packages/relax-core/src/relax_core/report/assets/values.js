// Last values side by side, and how far the draft layers are believed.

const lastOf = (run, name) => {
  const record = run.metrics.findLast((candidate) => name in candidate);
  return record && { step: record.step, value: toNumber(record[name]) };
};

// The last value of every metric; a value from before the run's last step says its step.
function valuesSection(runs, metrics) {
  const ends = runs.map((run) => run.metrics.at(-1).step);
  const rows = metrics
    .filter(({ name }) => runs.some((run) => lastOf(run, name)))
    .map(({ name, unit }) => [
      html("span", {}, name, unit ? html("span", { class: "unit" }, ` ${unit}`) : null),
      runs.map((run, i) => {
        const last = lastOf(run, name);
        if (!last) return "–";
        return format(last.value) + (last.step === ends[i] ? "" : ` (step ${last.step})`);
      }),
    ]);
  return html(
    "details",
    { class: "card values", open: runs.length > 1 },
    html("summary", {}, `Last values (${rows.length})`),
    comparison(runHeads(runs), rows),
  );
}

// Acceptance by depth. The length is that of drafts taken one after another: 1 + a + a b + a b c + ...
function draftSection(runs) {
  const pattern = /^mtp_acceptance_(\d+)$/;
  const depths = [...new Set(runs.flatMap((run) => run.metrics.flatMap((record) => Object.keys(record))))]
    .map((name) => pattern.exec(name))
    .filter(Boolean)
    .map((match) => Number(match[1]))
    .sort((a, b) => a - b);
  if (!depths.length) return null;
  const rates = runs.map((run) => depths.map((depth) => (lastOf(run, `mtp_acceptance_${depth}`) || { value: NaN }).value));
  const length = (all) => {
    let [sum, product] = [1, 1];
    for (const rate of all) if (Number.isFinite(rate)) sum += product *= rate;
    return sum;
  };
  return html(
    "section",
    { "aria-labelledby": "draft-head", id: "draft" },
    html("h2", { id: "draft-head" }, "MTP acceptance by depth"),
    comparison(runHeads(runs), [
      ...depths.map((depth, i) => [
        `depth ${depth}`,
        rates.map((all) => (Number.isFinite(all[i]) ? `${(100 * all[i]).toFixed(1)} %` : "–")),
      ]),
      ["tokens per verification, if depths are independent", rates.map((all) => (all.some(Number.isFinite) ? format(length(all), 3) : "–"))],
    ]),
  );
}
