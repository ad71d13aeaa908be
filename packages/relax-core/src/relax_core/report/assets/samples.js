// The table of sampled completions: filtered by text, run, step and reward; sorted by its heads.

const PAGE = 50;

function samplesSection(runs) {
  const rows = runs.flatMap((run) =>
    run.samples.map((sample, order) => ({
      ...sample,
      run: run.label,
      order,
      step: toNumber(sample.step),
      reward: toNumber(sample.reward),
      advantage: toNumber(sample.advantage),
      text: [sample.prompt, sample.completion, sample.answer].map(asText).join("\n").toLowerCase(),
    })),
  );
  const leftOut = runs.reduce((sum, run) => sum + run.samplesLeftOut, 0);
  const section = html("section", { id: "samples", "aria-labelledby": "samples-head" });
  section.append(html("h2", { id: "samples-head" }, "Sampled completions"));
  if (!rows.length) {
    section.append(html("p", { class: "quiet" }, "No completions were recorded."));
    return section;
  }
  const filter = { text: "", run: "", stepFrom: NaN, stepTo: NaN, rewardFrom: NaN, rewardTo: NaN };
  const order = { key: "step", down: false };
  let limit = PAGE;

  const input = (label, key, attributes, wide) => {
    const box = html("input", {
      ...attributes,
      oninput: (event) => {
        filter[key] = attributes.type === "number" ? toNumber(event.target.value) : event.target.value;
        limit = PAGE;
        draw();
      },
    });
    return html("label", { class: wide ? "wide" : null }, html("span", {}, label), box);
  };
  const number = (label, key) => input(label, key, { type: "number", step: "any", name: key });
  const form = html(
    "form",
    { class: "filters", role: "search", onsubmit: (event) => event.preventDefault(), onreset: () => setTimeout(reset) },
    input("Text", "text", { type: "search", name: "text", placeholder: "in prompt, completion or answer" }, true),
    runs.length > 1
      ? html(
          "label",
          {},
          html("span", {}, "Run"),
          html(
            "select",
            { name: "run", oninput: (event) => ((filter.run = event.target.value), (limit = PAGE), draw()) },
            html("option", { value: "" }, "all"),
            runs.map((run) => html("option", { value: run.label }, run.label)),
          ),
        )
      : null,
    number("Step from", "stepFrom"),
    number("to", "stepTo"),
    number("Reward from", "rewardFrom"),
    number("to", "rewardTo"),
    html("button", { type: "reset" }, "Clear"),
  );
  const count = html("p", { class: "quiet", role: "status", id: "sample-count" });
  const body = html("tbody");
  const more = html("button", { type: "button", class: "more", onclick: () => ((limit += PAGE), draw()) }, "Show more");
  const columns = [
    ...(runs.length > 1 ? [["run", "Run"]] : []),
    ["step", "Step", "number"],
    ["prompt", "Prompt"],
    ["completion", "Completion"],
    ...(rows.some((row) => row.answer !== undefined && row.answer !== null) ? [["answer", "Answer"]] : []),
    ["reward", "Reward", "number"],
    ["advantage", "Advantage", "number"],
  ];
  const heads = columns.map(([key, label, kind]) =>
    html(
      "th",
      { scope: "col", class: kind || null },
      html("button", { type: "button", onclick: () => sortBy(key) }, label, html("span", { class: "arrow" })),
    ),
  );

  function sortBy(key) {
    order.down = order.key === key ? !order.down : false;
    order.key = key;
    draw();
  }

  function reset() {
    Object.assign(filter, { text: "", run: "", stepFrom: NaN, stepTo: NaN, rewardFrom: NaN, rewardTo: NaN });
    limit = PAGE;
    draw();
  }

  const within = (value, from, to) => !(value < from) && !(value > to);
  const keep = (row) =>
    row.text.includes(filter.text.toLowerCase()) &&
    (!filter.run || row.run === filter.run) &&
    within(row.step, filter.stepFrom, filter.stepTo) &&
    within(row.reward, filter.rewardFrom, filter.rewardTo);

  function compare(a, b) {
    const [left, right] = [a[order.key], b[order.key]];
    const both = typeof left === "number" && typeof right === "number";
    const sign = both ? left - right || 0 : asText(left).localeCompare(asText(right));
    return (order.down ? -sign : sign) || a.step - b.step || a.order - b.order;
  }

  function draw() {
    const found = rows.filter(keep).sort(compare);
    count.textContent =
      `${found.length} of ${rows.length} completions` +
      (leftOut ? `; ${leftOut} more of the run are left out here and are in samples.jsonl` : "");
    body.replaceChildren(
      ...found.slice(0, limit).map((row) => html("tr", {}, columns.map(([key, , kind]) => cell(row, key, kind)))),
    );
    if (!found.length) {
      body.append(html("tr", {}, html("td", { colspan: columns.length, class: "quiet" }, "No completion fits.")));
    }
    more.hidden = found.length <= limit;
    heads.forEach((head, i) => {
      const sorted = columns[i][0] === order.key;
      head.setAttribute("aria-sort", sorted ? (order.down ? "descending" : "ascending") : "none");
    });
  }

  function cell(row, key, kind) {
    if (kind === "number") {
      const value = row[key];
      const tone = key === "advantage" && value ? (value > 0 ? " good" : " bad") : "";
      return html("td", { class: `number${tone}` }, Number.isNaN(value) ? "" : format(value));
    }
    return html("td", { class: `text ${key}` }, longText(asText(row[key]), filter.text));
  }

  draw();
  section.append(
    form,
    count,
    html("div", { class: "table-box" }, html("table", {}, html("thead", {}, html("tr", {}, heads)), body)),
    more,
  );
  return section;
}

const asText = (value) =>
  value === undefined || value === null ? "" : typeof value === "string" ? value : JSON.stringify(value);

// Text with the words looked for marked; long text is folded until asked for.
function longText(text, wanted) {
  const box = html("div", { class: "fold" }, marked(text, wanted));
  if (text.length < 240 && text.split("\n").length < 5) return box;
  box.classList.add("folded");
  const button = html(
    "button",
    {
      type: "button",
      class: "unfold",
      "aria-expanded": "false",
      onclick: () => {
        const folded = box.classList.toggle("folded");
        button.textContent = folded ? "more" : "less";
        button.setAttribute("aria-expanded", String(!folded));
      },
    },
    "more",
  );
  return [box, button];
}

function marked(text, wanted) {
  if (!wanted) return text;
  const parts = [];
  const [lower, word] = [text.toLowerCase(), wanted.toLowerCase()];
  let at = 0;
  for (let hit = lower.indexOf(word); hit >= 0; hit = lower.indexOf(word, at)) {
    parts.push(text.slice(at, hit), html("mark", {}, text.slice(hit, hit + word.length)));
    at = hit + word.length;
  }
  return [...parts, text.slice(at)];
}
