// The summary of a run: key figures, tables, and what its metrics mean.

import { count } from "./charts.js";
import { el, table } from "./dom.js";

export class SummaryView {
  constructor(body, page) {
    this.body = body;
    this.again(page.run);
  }

  again({ summary, metrics, damaged_lines: damaged }) {
    const isOpen = this.body.querySelector("details")?.open;
    const meanings = new Map(metrics.filter(({ meaning }) => meaning).map(({ name, unit, meaning }) => [name.split("/")[0], [unit, meaning]]));
    this.body.replaceChildren(
      summary.about ? el("p", { class: "quiet" }, summary.about) : "",
      summary.figures.length ? el("dl", { class: "figures wide" }, summary.figures.map(({ title, value, note, meaning }) => el("div", { class: "figure" }, el("dt", {}, el("abbr", { title: meaning }, title)), el("dd", {}, value), el("dd", { class: "quiet" }, note)))) : el("p", { class: "empty" }, "No step is recorded yet."),
      ...summary.tables.map(({ title, head, rows, note }) => el("section", {}, el("h2", {}, title), note ? el("p", { class: "quiet" }, note) : "", table(title, head, rows, { className: "wordy" }))),
      meanings.size ? el("details", { class: "card", open: isOpen }, el("summary", {}, "What the metrics mean"), el("dl", { class: "glossary" }, [...meanings].flatMap(([name, [unit, meaning]]) => [el("dt", {}, el("code", {}, name), unit ? el("small", {}, ` ${unit}`) : ""), el("dd", {}, meaning)]))) : "",
      damaged ? el("p", { class: "quiet" }, `${count(damaged)} damaged line${damaged === 1 ? " is" : "s are"} left out.`) : "");
  }

  eventsRead(run) {
    this.again(run);
  }
}
