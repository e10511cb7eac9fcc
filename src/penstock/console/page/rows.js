// What a step trained on: its rows, their documents, and the loss of each token as a colour.

import * as api from "./api.js";
import { el, failure, quiet, quoted } from "../charts/dom.js";
import { rowCard, rowsSaid } from "../charts/rows.js";
import { remember } from "./address.js";
import { count } from "../charts/charts.js";

const AT_ONCE = 4, MOST_SPIKES = 8;

export class RowsView {
  constructor(body, page, query) {
    Object.assign(this, { page, offset: Math.max(0, Number(query.get("row")) || 0), generation: page.run.generation });
    this.step = el("input", { type: "number", min: "1", "aria-label": "Step", value: query.get("step") || String(page.row.step || 1) });
    this.found = el("div", { class: "view" });
    this.said = el("p", { class: "quiet", role: "status" });
    this.ask = quiet(50, () => this.load());
    const spikes = (page.run.events || []).filter((event) => ["spike", "skip"].includes(event.kind)).slice(-MOST_SPIKES);
    const go = (step) => el("button", { type: "button", class: "chip", on: { click: () => { this.step.value = step; this.#move(0); } } }, `step ${count(step)}`);
    body.append(
      el("form", { class: "toolbar", on: { submit: (event) => { event.preventDefault(); this.#move(0); } } },
        el("label", {}, "Step ", this.step), el("button", { type: "submit", class: "button primary" }, "Show its rows"),
        spikes.length ? el("span", { class: "chips" }, el("span", { class: "quiet" }, "loss spikes: "), spikes.map((event) => go(event.step))) : ""),
      this.said, this.found);
    this.load();
  }

  #move(offset) {
    this.offset = offset;
    remember(`/run/${encodeURIComponent(this.page.id)}/rows`, { step: this.step.value, row: offset || "" });
    this.load();
  }

  async load() {
    const mine = (this.turn = (this.turn || 0) + 1);
    this.said.textContent = "Reading\u2026";
    try {
      const found = await api.rows(this.page.id, Number(this.step.value), { offset: this.offset, limit: AT_ONCE });
      if (mine === this.turn) this.#draw(found);
    } catch (error) {
      if (mine === this.turn) this.#failed(error);
    }
  }

  async #score(row, card) {
    const button = card.querySelector(".score"), mine = this.turn;
    button.disabled = true;
    const before = this.said.textContent;
    this.said.textContent = `Opening the checkpoint of step ${count(this.shown.checkpoint)}\u2026`;
    try {
      const found = await api.losses(this.page.id, this.shown.step, { offset: row, limit: 1 });
      if (mine !== this.turn) return;
      this.said.textContent = before;
      const drawn = this.#card(found.rows[0], found);
      card.replaceWith(drawn);
      drawn.querySelector("pre")?.focus();
    } catch (error) {
      if (mine !== this.turn) return;
      button.disabled = false;
      this.said.textContent = before;
      card.querySelector(".notice")?.remove();
      button.after(failure(error));
    }
  }

  #failed(error) {
    this.shown = null;
    this.said.textContent = "";
    this.found.replaceChildren(failure(error));
  }

  #draw(found) {
    this.shown = found;
    const { rows, num_rows: all, offset } = found;
    this.said.textContent = rows.length ? rowsSaid(found) : "";
    const move = (to) => this.#move(Math.max(0, to));
    const pager = all > rows.length ? el("nav", { class: "toolbar", "aria-label": "More rows" },
      el("button", { type: "button", class: "button", disabled: offset === 0, on: { click: () => move(offset - Math.min(AT_ONCE, found.limit)) } }, "Rows before"),
      el("button", { type: "button", class: "button", disabled: offset + rows.length >= all, on: { click: () => move(offset + rows.length) } }, "Rows after")) : "";
    this.found.replaceChildren(found.note ? el("p", { class: "notice" }, found.note) : "", found.why_no_losses ? el("p", { class: "quiet" }, found.why_no_losses) : "",
      ...(rows.length ? rows.map((row) => this.#card(row, found)) : [el("p", { class: "empty" }, "The step has no such row.")]), pager,
      el("p", { class: "quiet" }, "Its whole batch as arrays, on a command line: ", el("code", {}, this.#command(found.step))));
  }

  #command(step) {
    const run = this.page.row.path || this.page.run.name;
    return `penstock data replay ${quoted(run)} --steps ${step}:${step + 1} --out step-${step}`;
  }

  #card(row, found) {
    if (row.checkpoint !== null || found.why_no_losses) return rowCard(row);
    const score = el("button", { type: "button", class: "button score", on: { click: () => this.#score(row.row, card) } }, "Loss of each token");
    const card = rowCard(row, el("div", { class: "toolbar" }, score));
    return card;
  }

  again({ generation }) {
    if (generation !== this.generation) this.ask();  // else the rows are what they were
    this.generation = generation;
  }

  close() {
    this.turn = -1;
  }
}
