// The ranks of a run: their heat map, those that the others waited for, hangs and traces.

import { el, failure, table, throttled } from "./dom.js";
import { HeatMap, columnsOf } from "./heat_map.js";
import { remember } from "./address.js";
import { ago, count, seconds, written } from "./charts.js";

const MOST_SLOW = 8, LOOK_MS = 3000;

export class RanksView {
  constructor(body, page, query) {
    Object.assign(this, { body, page, source: page.source, turn: 0, metric: query.get("metric") || null, slow: el("section"), hangs: el("section", { class: "view" }), traces: el("section", { class: "view" }) });
    this.look = throttled(LOOK_MS, () => this.#look());
    document.addEventListener("visibilitychange", this.look);  // out of sight it did not look
    this.load();
    this.#readFiles();
  }

  async load({ isLive = false } = {}) {
    const mine = ++this.turn, points = columnsOf(this.body.clientWidth) || null;
    this.isLoading = true;
    this.isOutdated = false;
    try {
      const found = await this.source.ranks(this.page.id, this.metric, { points });
      if (mine === this.turn) this.#take(found);
    } catch (error) {
      if (mine !== this.turn || isLive) return;  // what was drawn stays
      this.#drop();
      this.body.replaceChildren(failure(error), this.hangs, this.traces);
    } finally {
      if (mine === this.turn) {
        this.isLoading = false;
        if (this.isOutdated) this.look();
      }
    }
  }

  // A table of many ranks has some megabytes: it is asked for if there are new records in it. One that is on its
  // way is waited for: over a slow link the next look comes sooner than the table.
  async #look() {
    if (this.isClosed || document.hidden) return;
    if (this.isLoading) {
      this.isOutdated = true;
      return;
    }
    const last = this.map ? this.map.found.steps.at(-1) + 1 : null, mine = this.turn;
    const news = await this.source.ranks(this.page.id, this.metric, { points: 1, from: last }).catch(() => null);
    if (news?.records && mine === this.turn) this.load({ isLive: true });
  }

  points() {
    this.look();
  }

  eventsRead() {
    this.#readFiles();
  }

  again() {
    this.load({ isLive: true });
    this.#readFiles();
  }

  #take(found) {
    this.metric = found.metric;
    if (!found.num_ranks || !found.steps.length) {
      this.#drop();
      this.slow.replaceChildren(...this.#slow(found.slow));
      this.body.replaceChildren(el("p", { class: "empty" }, found.note || "No record of single ranks yet. A run of several ranks writes one every few steps."), this.slow, this.hangs, this.traces);
      return;
    }
    if (!this.map) {
      this.map = new HeatMap((metric) => this.#choose(metric));
      this.body.replaceChildren(found.note ? el("p", { class: "notice" }, found.note) : "", this.map.root, this.map.highest, this.slow, this.hangs, this.traces);
    }
    this.map.show(found);
    found.values = "";  // some megabytes of text
    this.slow.replaceChildren(...this.#slow(found.slow));
  }

  #drop() {
    this.map?.close();
    this.map = null;
  }

  #choose(metric) {
    this.metric = metric;
    remember(`/run/${encodeURIComponent(this.page.id)}/ranks`, { metric });
    this.load();
  }

  // Ranks that the others waited for, from comparisons every few steps.
  #slow(comparisons) {
    const found = new Map();
    for (const { step, rank, own_s: own, median_s: median } of comparisons) {
      const { times, ratio } = found.get(rank) ?? { times: 0, ratio: 0 };
      found.set(rank, { times: times + 1, ratio: Math.max(ratio, own / median), step });
    }
    if (!found.size) return [];
    const rows = [...found].sort(([, a], [, b]) => b.ratio - a.ratio).slice(0, MOST_SLOW);
    return [el("h2", {}, "Ranks the others waited for"), table("Ranks the others waited for", ["rank", "comparisons", "times the median at most", "last at step"],
      rows.map(([rank, { times, ratio, step }]) => [String(rank), count(times), ratio.toFixed(2), count(step)]))];
  }

  async #readFiles() {
    const [hangs, traces] = await Promise.all([this.source.hangs, this.source.traces].map((read) => read(this.page.id).catch(() => null)));
    if (this.isClosed) return;
    const read = JSON.stringify([hangs, traces]);
    if (read === this.read) return;  // what a reader has opened stays open
    this.read = read;
    if (hangs) this.#drawHangs(hangs);
    if (traces) this.#drawTraces(traces);
  }

  #drawHangs({ hangs, unread, num_unread: others, num_beyond: beyond }) {
    if (!hangs.length && !others) return this.hangs.replaceChildren();
    this.hangs.replaceChildren(el("h2", {}, "Hangs"), ...[...hangs].reverse().map(hangOf),
      others ? el("p", { class: "notice" }, `Files that are damaged, too large or of another version are not in the diagnosis: ${unread.join(", ")}${others > unread.length ? " and others" : ""}.`) : "",
      beyond ? el("p", { class: "notice" }, `There are too many files: the diagnosis leaves out the ${count(beyond)} oldest.`) : "");
  }

  #drawTraces({ traces, num_traces: all }) {
    if (!all) return this.traces.replaceChildren();
    const rows = traces.map(({ name, bytes, time }) => [el("a", { href: this.source.traceAddress(this.page.id, name), download: name }, name), written(bytes, "bytes"), ago(time)]);
    this.traces.replaceChildren(el("h2", {}, "Traces"), el("p", { class: "quiet" }, "Profiled steps (measure.trace_steps): ui.perfetto.dev opens .json.gz, pytorch.org/memory_viz opens .pickle.", all > traces.length ? ` The newest ${traces.length} of ${count(all)}.` : ""),
      table("Traces", ["file", "size", "written"], rows));
  }

  close() {
    this.turn = -1;
    this.isClosed = true;
    document.removeEventListener("visibilitychange", this.look);
    this.#drop();
  }
}

function hangOf({ time, text, ranks, num_ranks: all }) {
  const calls = ({ rank, host, step, doing, stacks }) => [el("h3", {}, `rank ${rank} on ${host}, step ${count(step)} (${doing})`),
    ...Object.entries(stacks).map(([thread, stack]) => el("pre", { tabindex: "0", role: "region", "aria-label": `${thread} of rank ${rank}` }, `${thread}\n  ${stack.join("\n  ")}`))];
  return el("article", { class: "card" }, el("p", { class: "quiet" }, ago(seconds(time))), el("p", {}, text),
    el("details", {}, el("summary", {}, ranks.length < all ? `Calls of ${ranks.length} of ${count(all)} ranks` : "Calls of each rank"), el("div", { class: "view" }, ranks.flatMap(calls))));
}
