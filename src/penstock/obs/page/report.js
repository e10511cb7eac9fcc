// A report: the page of its runs reads what is inlined in #runs, and asks for nothing.

import { known } from "./charts.js";
import { start } from "./router.js";
import * as compare from "./compare.js";
import * as run from "./run.js";

const { runs, comparison, written } = JSON.parse(document.querySelector("#runs").textContent);
const byId = new Map(runs.map((one) => [one.run.id, one]));

async function of(id) {
  if (!byId.has(id)) throw new Error("This file has no such run.");
  return byId.get(id);
}

/** Return metric -> { x, y, means }; thinned as they are inlined, whatever range is asked for. */
async function curves(id, _, along) {
  const found = new Map();
  for (const { x, series, means } of (await of(id)).curves) {
    if (!x[along]) throw new Error("The cost of this run is not known.");
    if (!found.size) found.set("step", known(x[along], x.step));
    for (const name of Object.keys(series)) if (!found.has(name)) found.set(name, known(x[along], series[name], means[name]));
  }
  return found;
}

/** Return metric -> its last value up to a place of the axis. */
async function values(id, names, along, at) {
  const found = await curves(id, names, along);
  return Object.fromEntries(names.map((name) => {
    const { x = [], y } = found.get(name) ?? {}, i = x.findLastIndex((place) => place <= at);
    return [name, i < 0 ? null : y[i]];
  }));
}

/** Return a metric of the ranks as the console's route answers; names of hosts, devices and interfaces are inlined once. */
async function ranks(id, metric) {
  const { ranks: { shown, tables, names, places, note, slow } } = await of(id), found = tables[metric ?? shown];
  if (!found) return { metric: null, num_ranks: 0, steps: [], slow, note };
  const named = (place) => Object.fromEntries(Object.entries(places[place]).map(([what, numbers]) => [what, numbers.map((i) => names[i])]));
  return { ...found, slow, note, metric: metric ?? shown, metrics: Object.keys(tables), starts: found.starts.map(([column, place]) => ({ column, ...named(place) })) };
}

async function rows(id, step, { offset, limit }) {
  const { rows: found } = await of(id);
  const shown = found?.step === step ? found.rows.slice(offset, offset + limit) : [];
  if (shown.length) return { ...found, rows: shown, offset, limit };
  throw new Error(`These rows are not in this file. To include the first rows of a step: penstock report RUN --rows ${step}`);
}

const source = {
  isLive: false, curves, values, ranks, rows,
  runs: async () => runs.map((one) => one.run.row),
  run: async (id) => (await of(id)).run,
  compare: async () => comparison,
  hangs: async (id) => (await of(id)).hangs,
  traces: async () => null,
  answers: async (id) => (await of(id)).answers,
};

document.querySelector("#live").textContent = `as of ${written}`;
const [{ run: { id, name } }] = runs;
start(source, runs.length > 1
  ? { title: "Compare", word: "compare", open: () => compare.open(source, new URLSearchParams({ runs: runs.map((one) => encodeURIComponent(one.run.id)).join(",") })) }
  : { title: name, word: "run", open: (query) => run.open(source, {}, id, null, query) });
