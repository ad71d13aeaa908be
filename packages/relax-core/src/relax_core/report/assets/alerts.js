// What the runs warned of, each with what to do; nothing where no run warned.

function alertsSection(runs) {
  const found = runs.flatMap((run) => run.alerts.map((alert) => ({ run: run.label, ...alert })));
  if (!found.length) return null;
  const where = (alert) => [runs.length > 1 ? alert.run : "", `step ${alert.step}`].filter(Boolean).join(", ");
  return html(
    "section",
    { "aria-labelledby": "alerts-head" },
    html("h2", { id: "alerts-head" }, `Alerts (${found.length})`),
    html(
      "ul",
      { class: "card alerts" },
      found.map((alert) =>
        html(
          "li",
          { "data-alert": alert.name },
          html("b", {}, `${where(alert)}: `),
          `${asText(alert.message ?? alert.name)}. `,
          alert.advice ? html("span", { class: "quiet" }, `${asText(alert.advice)}.`) : null,
        ),
      ),
    ),
  );
}
