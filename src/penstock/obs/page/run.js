// One run: its head, and the views under it. What is new arrives over the stream and is drawn at once.

import { el, link, pill } from "./dom.js";
import { CurvesView } from "./curves.js";
import { AnswersView } from "./answers.js";
import { RanksView } from "./ranks.js";
import { RecipeView } from "./recipe.js";
import { RowsView } from "./rows.js";
import { SummaryView } from "./summary.js";
import { takeAlong } from "./address.js";
import { ago, count, duration, written } from "./charts.js";

/** Return the page of a run. others: views that not every page has, name -> [title, class]. */
export async function open(source, others, id, tab, query) {
  const views = {
    curves: ["Curves", CurvesView], summary: ["Summary", SummaryView], ...others,
    ranks: ["Ranks", RanksView], rows: ["Rows", RowsView], answers: ["Answers", AnswersView], recipe: ["Recipe", RecipeView] };
  return new RunPage(source, views, id, await source.run(id), tab, query);
}

class RunPage {
  constructor(source, views, id, run, tab, query) {
    Object.assign(this, { source, views, id, run, row: run.row, cursor: run.cursor, view: null, first: [tab, query], title: run.name });
    const part = () => el("div", { class: "place" });
    this.parts = { state: part(), age: el("p", { class: "quiet" }), figures: part() };  // what changes; the link keeps the focus
    this.head = el("section", { class: "run-head", "aria-label": "Summary" },
      el("div", { class: "title" }, el("h1", {}, run.name), this.parts.state, this.parts.age, source.isLive ? link(`#/compare?runs=${encodeURIComponent(id)}`, "Compare\u2026", "button") : ""), this.parts.figures);
    this.tabs = el("nav", { class: "tabs", "aria-label": "Views of the run" });
    this.body = el("div", { class: "view" });
    this.root = el("div", { class: "page" }, this.head, el("div", { class: "tab-row" }, this.tabs, source.isLive ? takeAlong([run.row.path]) : ""), this.body);
    this.#drawHead();
  }

  begin() {
    this.show(...this.first);
    this.clock = setInterval(() => this.#drawHead(), 10_000);
    this.end = this.source.follow?.([this.id], {
      points: (data) => this.view?.points?.(data),
      row: (data) => {
        const row = data.row ?? data;
        if (row.id !== this.id) return;
        this.row = { ...this.row, ...row };
        this.#drawHead();
      },
      gone: () => {
        this.row = { ...this.row, state: null, error: "The folder of this run was deleted. This page still shows what it has read." };
        this.#drawHead();
      },
      event: () => this.#readEvents(),
      samples: () => this.view?.samples?.(),
      reset: () => this.again(),
      at: ({ cursor }) => { this.cursor = cursor; },
    }, () => [this.cursor]);
  }

  // Whatever is shown: a view that is opened later draws the events too.
  async #readEvents() {
    const run = await this.source.run(this.id).catch(() => null);
    if (!run || this.isClosed) return;
    this.run = run;
    this.view?.eventsRead?.(run);
  }

  /** Read the run again: it was rewound, its file was rewritten, or too much is new to be sent in points. */
  async again() {
    const run = await this.source.run(this.id).catch(() => null);
    if (!run || this.isClosed) return;  // deleted while it is watched: what was drawn stays
    this.run = run;
    this.cursor = run.cursor;  // of what the views read next; what came over the stream before has no cursor
    this.row = this.run.row ?? this.row;
    this.#drawHead();
    this.view?.again?.(this.run);
  }

  /** Return true if the new address is another view of this run, which is then shown. */
  moved(words, query) {
    if (words[0] !== "run" || words[1] !== this.id) return false;
    this.show(words[2], query);
    return true;
  }

  show(name, query) {
    const tab = Object.hasOwn(this.views, name ?? "") ? name : "curves";
    this.view?.close?.();
    this.tabs.replaceChildren(...Object.entries(this.views).map(([one, [title]]) => {
      const found = link(`#/run/${encodeURIComponent(this.id)}/${one}`, title);
      if (one === tab) found.setAttribute("aria-current", "page");
      return found;
    }));
    this.tabs.querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "center" });
    const body = el("div", { class: "view" });  // what the view before draws late is seen by nobody
    this.body.replaceWith(body);
    this.body = body;
    this.view = new this.views[tab][1](this.body, this, query);
  }

  close() {
    this.isClosed = true;
    this.view?.close?.();
    this.end?.();
    clearInterval(this.clock);
  }

  #drawHead() {
    const { row } = this;
    const figure = (title, value, note = "") => el("div", { class: "figure" }, el("dt", {}, title), el("dd", { title: note }, value));
    this.parts.state.replaceChildren(row.state ? pill(row.state) : "");
    this.parts.age.replaceChildren(this.run.summary.ended ? `${this.run.summary.ended} \u00b7 ` : "", row.updated ? `last record ${ago(row.updated)}` : "",
      row.ranks ? ` \u00b7 ${count(row.ranks)} rank${row.ranks === 1 ? "" : "s"}` : "");
    this.parts.figures.replaceChildren(
      row.error ? el("p", { class: "notice bad" }, row.error) : "",
      el("dl", { class: "figures" },
        figure(row.steps ? `step of ${count(row.steps)}` : "step", count(row.step)),
        figure("loss", written(row.loss)),
        figure("tokens", written(row.tokens)),
        figure("tokens/s", written(row.tokens_per_s)),
        figure("MFU", written(row.mfu, "share"), row.mfu === null ? "No step has one: the peak of the devices is not known, or other programs used them while it was measured." : ""),
        figure("data wait", written(row.data_wait, "share")),
        row.ranks === 1 ? "" : figure("exposed", written(row.exposed, "share")),
        row.state === "training" ? figure("time left", duration(row.eta_s)) : "",
        figure("cost", written(row.cost))),
      row.steps ? bar(row) : "");
  }
}

/** Return how far a run is, as a bar. */
export function bar(row) {
  const done = row.steps ? Math.min(row.step / row.steps, 1) : 0, fill = el("i");
  fill.style.width = `${100 * done}%`;
  return el("span", { class: `bar-of ${row.state}`, "aria-hidden": "true" }, fill);
}
