"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#7a3fa0", "#444444"]; // Okabe and Ito
const MOST = COLOURS.length;
const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
const view = { sort: data.sort, descending: data.descending, filter: "", rows: data.rows, ticked: new Set() };
const $ = (id) => document.getElementById(id);

// Cells and their texts

const cell = (row, key) => (key in row.cells ? row.cells[key] : key in data.constants ? data.constants[key] : null);
const isNumber = (value) => typeof value === "number" && isFinite(value);
const lower = (key) => data.lower.includes(key);

function asText(value) {
  if (value === null || value === undefined) return "null";
  if (Array.isArray(value)) return `[${value.map(asText).join(",")}]`;
  return String(value);
}

function shown(key, value) {
  if (value === null || value === undefined) return "";
  if (!isNumber(value)) return asText(value);
  if (key.endsWith("_bytes")) return `${Number((value / 2 ** 30).toPrecision(3))} GiB`;
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(4)));
}

function shownResult(row, key) {
  const text = shown(key, cell(row, key)), spread = row.spreads[key];
  return spread && text ? `${text} ± ${shown(key, spread[0])} (${spread[1]})` : text;
}

// Plotly reads tags in its texts; labels are never meant as such.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function options(select, keys, chosen) {
  select.replaceChildren(...keys.map((key) => Object.assign(element("option", key), { value: key })));
  if (keys.includes(chosen)) select.value = chosen;
}

// Filter and sort: the same words as --where and --sort

const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;

function resolve(word) {
  if (data.keys.includes(word)) return word;
  const ending = data.keys.filter((key) => key.endsWith(`.${word}`) || key.endsWith(`/${word}`));
  if (ending.length === 1) return ending[0];
  throw new Error(ending.length ? `${word} may be ${ending.join(", ")}` : `no row has a key ${word}`);
}

function clause(text) {
  const found = text.match(/^\s*([^\s<>=!~]+)\s*(>=|<=|!=|==|=|~|>|<)\s*(.*?)\s*$/);
  if (!found) return (row) => row.text.includes(text.trim().toLowerCase());
  const key = resolve(found[1]), operator = found[2] === "==" ? "=" : found[2];
  let wanted = found[3];
  if ("<>".includes(operator[0]) && !NUMBER.test(wanted)) throw new Error(`${wanted || "nothing"} is no number`);
  if (wanted.length > 1) wanted = wanted.replace(/^['"]+|['"]+$/g, "");
  const number = Number(wanted), numeric = NUMBER.test(wanted);
  const equal = (value) => (typeof value === "number" && numeric ? value === number : asText(value) === wanted.replaceAll(", ", ","));
  const tests = {
    "=": equal, "!=": (value) => !equal(value),
    "~": (value) => asText(value).toLowerCase().includes(wanted.toLowerCase()),
    ">": (value) => value > number, ">=": (value) => value >= number,
    "<": (value) => value < number, "<=": (value) => value <= number,
  };
  const sized = "<>".includes(operator[0]);
  return (row) => { const value = cell(row, key); return (!sized || typeof value === "number") && tests[operator](value); };
}

function filtered() {
  const clauses = view.filter.trim() ? view.filter.split(/\s+and\s+/).map(clause) : [];
  return data.rows.filter((row) => clauses.every((holds) => holds(row)));
}

function order(one, other) {
  const a = cell(one, view.sort), b = cell(other, view.sort);
  const rank = (value) => (isNumber(value) ? 0 : value === null ? 2 : 1);
  if (rank(a) !== rank(b)) return rank(a) - rank(b);
  const way = view.descending ? -1 : 1;
  return isNumber(a) ? way * (a - b) : way * asText(a).localeCompare(asText(b));
}

function update() {
  try {
    view.kept = filtered();
    view.rows = [...view.kept].sort(order);
    $("filter-error").hidden = true;
  } catch (error) {
    $("filter-error").textContent = error.message;
    $("filter-error").hidden = false;
    return;
  }
  drawTable();
  later(drawPicked, ...($("heat").hidden ? [] : [drawHeat]), drawPareto);
}

// The table answers at once; plots follow one by one, and those of an older filter are never begun.
let waiting = [];

function later(...draws) {
  waiting.forEach(clearTimeout);
  waiting = draws.map((draw) => setTimeout(draw));
}

const drawn = {};

// Plotly takes its time: what would be drawn as it stands there already is left alone.
function plot(id, traces, arranged) {
  const state = JSON.stringify([traces, arranged]);
  if (drawn[id] === state) return;
  drawn[id] = state;
  Plotly.react(id, traces, arranged, CONFIG);
}

const picked = () => {
  const ticked = view.rows.filter((row) => view.ticked.has(row.id));
  return (ticked.length ? ticked : view.rows).slice(0, MOST);
};

// The table. Rows are made once: sorting and filtering only put them in place.

function drawTable() {
  const colours = new Map(picked().map((row, place) => [row.id, COLOURS[place]]));
  for (const column of data.columns) {
    const arrow = sortKey(column.key) === view.sort ? (view.descending ? " ↓" : " ↑") : "";
    column.button.textContent = column.key + arrow;
    column.button.parentNode.setAttribute("aria-sort", arrow ? (view.descending ? "descending" : "ascending") : "none");
  }
  for (const row of view.rows) row.dot.style.background = colours.get(row.id) || "transparent";
  for (const { key, place } of data.columns.filter((one) => data.ranked.includes(one.key))) {
    const values = view.rows.map((row) => cell(row, key)).filter(isNumber);
    const best = values.length > 1 ? Math[lower(key) ? "min" : "max"](...values) : null;
    for (const row of view.rows) row.tr.cells[place].classList.toggle("best", best !== null && cell(row, key) === best);
  }
  $("table").tBodies[0].replaceChildren(...view.rows.map((row) => row.tr));
  $("count").textContent = `${view.rows.length} of ${data.rows.length} rows`;
}

function makeTable() {
  const head = element("tr");
  data.columns.forEach((column, place) => {
    const th = element("th", undefined, column.kind === "text" ? "text" : "");
    column.place = place;
    column.button = element("button");
    column.button.addEventListener("click", () => sortBy(sortKey(column.key)));
    th.append(column.button);
    head.append(th);
  });
  $("table").tHead.replaceChildren(head);
  for (const row of data.rows) {
    row.tr = element("tr");
    row.tr.append(...data.columns.map(({ key, kind }) => made(row, key, kind)));
  }
}

function made(row, key, kind) {
  const td = element("td");
  if (key === "run") {
    const label = element("label"), tick = element("input");
    row.dot = element("span", "", "dot");
    tick.type = "checkbox";
    tick.addEventListener("change", () => {
      view.ticked[tick.checked ? "add" : "delete"](row.id);
      drawTable();
      later(drawPicked);
    });
    label.append(tick, row.dot, row.name);
    label.title = row.label;
    td.append(label);
  } else if (key === "state") {
    td.className = "text";
    td.append(element("span", row.state.replaceAll("_", " "), `state ${row.state}`));
    td.title = row.reason;
  } else {
    const value = cell(row, key);
    td.textContent = kind === "result" ? shownResult(row, key) : there(row, key) ? shownConfig(key, value) : "";
    if (!isNumber(value)) td.className = "text";
  }
  return td;
}

const sortKey = (key) => (key === "run" ? "label" : key);
const there = (row, key) => key in row.cells || key in data.constants;
const shownConfig = (key, value) => (isNumber(value) ? String(Number(value.toPrecision(6))) : asText(value));

function sortBy(key) {
  view.descending = view.sort === key ? !view.descending : false;
  view.sort = key;
  update();
}

// Curves

const layout = (more) => ({
  margin: { l: 58, r: 14, t: 30, b: 46 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff", showlegend: false,
  font: { family: "system-ui, sans-serif", size: 12, color: "#1c2430" }, hovermode: "closest", ...more,
});
const axis = (title, more) => ({ title: { text: title, standoff: 12 }, gridcolor: "#e7eaef", zeroline: false, automargin: true, ...more });

// A step's place on another axis, between the steps that were logged.
function along(run, name, step) {
  if (name === "steps") return step;
  const { steps, [name]: values } = run.axis;
  if (!steps.length) return null;
  if (step <= steps[0]) return (values[0] * step) / steps[0];
  let low = 0, high = steps.length - 1;
  if (step >= steps[high]) return values[high];
  while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
  return values[low] + ((values[high] - values[low]) * (step - steps[low])) / (steps[high] - steps[low]);
}

function drawCurves() {
  const metric = $("curve-metric").value, over = $("curve-axis").value, traces = [], legend = [];
  picked().forEach((row, place) => {
    const having = row.runs.filter((number) => data.runs[number].curves[metric]);
    const item = element("li"), dot = element("span", "", "dot");
    dot.style.background = COLOURS[place];
    item.append(dot, row.label + (having.length ? "" : " (has no such metric)"));
    legend.push(item);
    having.forEach((number, seed) => {
      const run = data.runs[number], [steps, values] = run.curves[metric];
      traces.push({
        type: "scatter", mode: values.length < 25 ? "lines+markers" : "lines", name: plain(run.label), x: steps.map((step) => along(run, over, step)),
        y: values, line: { color: COLOURS[place], width: 2, dash: ["solid", "dot", "dash", "dashdot"][seed % 4] },
        hovertemplate: `%{y:.5g} at %{x:.6g}<extra>${plain(run.label)}</extra>`,
      });
    });
  });
  $("legend").replaceChildren(...legend);
  const title = { steps: "optimizer steps", tokens: "tokens", seconds: "seconds of training steps" }[over];
  plot("curve-plot", traces, layout({
    xaxis: axis(title), yaxis: axis(plain(metric), { type: $("curve-log").checked ? "log" : "linear" }),
  }));
}

// Heat map

function drawHeat() {
  const [x, y, metric] = ["heat-x", "heat-y", "heat-metric"].map((id) => $(id).value);
  $("heat-note").textContent = "";
  if (!x || !y || x === y) {
    $("heat-note").textContent = "Two different keys with several values are needed.";
    Plotly.purge("heat-plot");
    delete drawn["heat-plot"];
    return;
  }
  const values = (key) => [...new Set(view.kept.map((row) => asText(cell(row, key))))].sort((a, b) => {
    const [one, other] = [Number(a), Number(b)];
    return isNaN(one) || isNaN(other) ? a.localeCompare(b) : one - other;
  });
  const xs = values(x), ys = values(y), missing = [];
  const roomy = (0.6 * $("heat-plot").clientWidth) / xs.length > 36;
  const z = ys.map((down, high) => xs.map((across, wide) => {
    const rows = view.kept.filter((row) => asText(cell(row, x)) === across && asText(cell(row, y)) === down);
    const numbers = rows.filter((row) => row.state.includes("finished")).map((row) => cell(row, metric)).filter(isNumber);
    if (numbers.length) return numbers.reduce((sum, one) => sum + one, 0) / numbers.length;
    const states = [...new Set(rows.map((row) => (row.state === "out_of_memory" ? "OOM" : row.state.replaceAll("_", " "))))].join("<br>");
    // By place: a category "1024" would be read as the 1024th one.
    if (rows.length) missing.push({ x: wide, y: high, text: states, showarrow: false, font: { size: 11, color: "#8a4b00" } });
    return null;
  }));
  plot("heat-plot", [{
    type: "heatmap", x: xs, y: ys, z, text: z.map((line) => line.map((value) => shown(metric, value))), texttemplate: roomy ? "%{text}" : "",
    colorscale: "Viridis", reversescale: lower(metric), hoverongaps: false, colorbar: { thickness: 10, outlinewidth: 0 },
    hovertemplate: `${plain(x)} %{x}<br>${plain(y)} %{y}<br>${plain(metric)} %{z:.5g}<extra></extra>`, xgap: 2, ygap: 2,
  }], layout({
    xaxis: axis(plain(x), { type: "category", showgrid: false }), yaxis: axis(plain(y), { type: "category", showgrid: false }), annotations: missing,
  }));
  const several = view.kept.length > xs.length * ys.length;
  $("heat-note").textContent = `Bright is good.${several ? " Cells with several rows show their mean." : ""}`;
}

// Quality, memory, speed

function drawPareto() {
  const keys = ["pareto-y", "pareto-x", "pareto-colour"].map((id) => $(id).value);
  const rows = view.kept.filter((row) => row.state.includes("finished") && keys.every((key) => isNumber(cell(row, key))));
  const goods = rows.map((row) => keys.map((key) => (lower(key) ? -1 : 1) * cell(row, key)));
  const best = goods.map((mine) => !goods.some((other) => other.every((one, place) => one >= mine[place]) && other.some((one, place) => one > mine[place])));
  const roomy = $("pareto-plot").clientWidth > 560 && best.filter(Boolean).length <= 10;
  const colours = rows.map((row) => cell(row, keys[2]) / (keys[2].endsWith("_bytes") ? 2 ** 30 : 1));
  plot("pareto-plot", [{
    type: "scatter", mode: roomy ? "markers+text" : "markers", x: rows.map((row) => cell(row, keys[1])), y: rows.map((row) => cell(row, keys[0])),
    text: rows.map((row, place) => (best[place] ? plain(row.name) : "")), textposition: "top center", cliponaxis: false,
    hovertext: rows.map((row) => `${plain(row.label)}<br>${keys.map((key) => `${plain(key)} ${shownResult(row, key)}`).join("<br>")}`), hoverinfo: "text",
    marker: {
      size: best.map((one) => (one ? 13 : 9)), symbol: best.map((one) => (one ? "diamond" : "circle")), color: colours, colorscale: "Cividis",
      opacity: best.map((one) => (one ? 1 : 0.55)), line: { width: best.map((one) => (one ? 1.5 : 0)), color: "#1c2430" },
      colorbar: { thickness: 10, outlinewidth: 0, title: { text: keys[2].endsWith("_bytes") ? "GiB" : "", side: "top" } },
    },
  }], layout({ xaxis: axis(plain(keys[1])), yaxis: axis(plain(keys[0])) }));
}

// Differences, answers, configuration

function drawDifferences() {
  const metric = $("difference-metric").value, found = data.differences.filter((one) => one.metric === metric);
  if (!data.differences.length) {
    $("difference-note").textContent = "No two runs have kept scores of the same held-out examples.";
    $("difference-metric").parentNode.style.display = $("difference-table").parentNode.style.display = "none";
    return;
  }
  $("difference-note").textContent = `Mean difference from ${data.baseline}, with a 95 % paired interval over held-out examples (bootstrap-t). `
    + "It is about these very artifacts: other seeds may differ by more.";
  const reach = Math.max(...found.flatMap((one) => [Math.abs(one.low ?? 0), Math.abs(one.high ?? 0)]), 1e-12);
  const place = (value) => `${50 + (50 * value) / reach}%`;
  const heads = ["run", "", "difference", "interval", "examples", "verdict"].map((head) => element("th", head, head === "verdict" ? "text" : ""));
  const line = element("tr");
  line.append(...heads);
  $("difference-table").tHead.replaceChildren(line);
  $("difference-table").tBodies[0].replaceChildren(...found.map((one) => {
    const tr = element("tr"), bar = element("div", "", `bar ${one.verdict}`), signed = (value) => (value > 0 ? "+" : "") + Number(value.toPrecision(3));
    if (one.low !== null) {
      const range = element("i"), point = element("b");
      range.style.left = place(one.low);
      range.style.width = `${(50 * (one.high - one.low)) / reach}%`;
      point.style.left = place(one.mean);
      bar.append(range, point);
    }
    const drawn = element("td");
    drawn.append(bar);
    tr.append(element("td", data.runs[one.run].label), drawn, element("td", one.mean === null ? "" : signed(one.mean)),
      element("td", one.low === null ? "" : `${signed(one.low)} to ${signed(one.high)}`), element("td", one.examples), element("td", one.verdict, "text"));
    return tr;
  }));
}

function drawAnswers() {
  const prompt = data.answers.prompts[$("answer-prompt").value];
  if (!prompt) {
    $("answer-list").replaceChildren(element("p", "No run has generated answers.", "note"));
    return;
  }
  const card = (head, text, name) => {
    const made = element("div", undefined, `answer ${name}`);
    made.append(element("h3", head), element("p", text));
    return made;
  };
  const cards = [card("prompt", prompt.prompt, "given")];
  if (prompt.expected) cards.push(card("expected", prompt.expected, "given"));
  if (prompt.before !== null) cards.push(card(`before training (${data.answers.before})`, prompt.before, ""));
  for (const number of picked().flatMap((row) => row.runs)) {
    const text = prompt.answers[number];
    if (text !== undefined) cards.push(card(data.runs[number].label, text, text.trim() === prompt.expected.trim() ? "exact" : ""));
  }
  $("answer-list").replaceChildren(...cards);
}

function drawConfig() {
  const rows = picked(), differing = data.config.filter((key) => new Set(rows.map((row) => asText(cell(row, key)))).size > 1);
  const head = element("tr");
  head.append(element("th", "key"), ...rows.map((row) => element("th", row.name)));
  $("config-table").tHead.replaceChildren(head);
  const lines = differing.map((key) => {
    const tr = element("tr");
    tr.append(element("td", key), ...rows.map((row) => element("td", there(row, key) ? shownConfig(key, cell(row, key)) : "")));
    return tr;
  });
  if (!lines.length) { const tr = element("tr"); tr.append(element("td", rows.length < 2 ? "one row alone" : "nothing")); lines.push(tr); }
  $("config-table").tBodies[0].replaceChildren(...lines);
}

function drawPicked() { drawCurves(); drawAnswers(); drawConfig(); }

function start() {
  $("title").textContent = data.title;
  $("subtitle").textContent = data.subtitle;
  data.rows.forEach((row, id) => {
    row.id = id;
    row.text = [row.name, row.label, row.state, row.reason].join(" ").toLowerCase();
  });
  const numeric = data.results, metrics = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))];
  options($("curve-metric"), metrics, metrics.includes("eval/loss/loss") && data.longEval ? "eval/loss/loss" : "train/loss");
  const flat = data.differing.length < 2;
  $("heat").hidden = document.querySelector("nav a[href='#heat']").hidden = flat; // a map has two sides
  options($("heat-x"), data.differing, data.axes[0]);
  options($("heat-y"), data.differing, data.axes[1]);
  const first = (names) => names.find((name) => numeric.includes(name));
  const quality = first(["eval/loss/loss", "train/loss"]);
  options($("heat-metric"), numeric, quality);
  options($("pareto-y"), numeric, quality);
  options($("pareto-x"), numeric, first(["perf/tokens_per_s", "time/train_s"]));
  options($("pareto-colour"), numeric, first(["mem/peak_bytes", "model/trainable_parameters"]));
  options($("difference-metric"), [...new Set(data.differences.map((one) => one.metric))], "eval/loss/loss");
  $("answer-prompt").replaceChildren(...data.answers.prompts.map((one, place) =>
    Object.assign(element("option", one.prompt.replace(/\s+/g, " ").slice(0, 90)), { value: place })));
  $("filter").addEventListener("input", () => { view.filter = $("filter").value; update(); });
  for (const id of ["curve-metric", "curve-axis", "curve-log"]) $(id).addEventListener("change", drawCurves);
  for (const id of ["heat-x", "heat-y", "heat-metric"]) $(id).addEventListener("change", drawHeat);
  for (const id of ["pareto-y", "pareto-x", "pareto-colour"]) $(id).addEventListener("change", drawPareto);
  $("difference-metric").addEventListener("change", drawDifferences);
  $("answer-prompt").addEventListener("change", drawAnswers);
  makeTable();
  update();
  drawDifferences();
}

start();
