// What a step trained on: its rows as cards, with their documents, learned tokens, and the loss of each token as a colour.

import { remember } from "./address.js";
import { count, written } from "./charts.js";
import { el, failure, quiet, quoted } from "./dom.js";

const AT_ONCE = 4, MOST_SPIKES = 8, WORST = 12, SHADES = 6;

export class RowsView {
  constructor(body, page, query) {
    Object.assign(this, { page, offset: Math.max(0, Number(query.get("row")) || 0), generation: page.run.generation });
    this.step = el("input", { type: "number", min: "1", "aria-label": "Step", value: query.get("step") || String(page.run.rows_step ?? (page.row.step || 1)) });
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
      const found = await this.page.source.rows(this.page.id, Number(this.step.value), { offset: this.offset, limit: AT_ONCE });
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
      const found = await this.page.source.losses(this.page.id, this.shown.step, { offset: row, limit: 1 });
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
      el("p", { class: "quiet" }, "To write the whole batch as arrays: ", el("code", {}, this.#command(found.step))));
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

/** Return the card of a row, with other nodes under its heading. */
function rowCard(row, ...others) {
  const facts = [`row ${count(row.row)}`, `sample ${count(row.sample)}`, row.epoch ? `epoch ${count(row.epoch)}` : "", row.loss !== null ? `loss ${written(row.loss)}` : ""];
  const hasUnlearned = row.documents.some(({ pieces }) => pieces.some(([, learned]) => !learned));
  return el("article", { class: "card" },
    el("h2", {}, `${row.corpus || "padding"} `, el("small", {}, facts.filter(Boolean).join(" \u00b7 "))),
    row.checkpoint !== null ? legend(row.checkpoint) : "", others,
    hasUnlearned ? el("p", { class: "quiet" }, el("span", { class: "unlearned" }, "Dimmed"), " tokens are read, not learned.") : "",
    row.documents.map((document) => documentOf(document)));
}

/** Return which rows of a step are shown, as text. */
const rowsSaid = ({ step, rows, offset, num_rows: all }) => `Step ${count(step)}: rows ${count(offset)} to ${count(offset + rows.length - 1)} of ${count(all)}`;

function legend(checkpoint) {
  const scale = Array.from({ length: SHADES }, (_, i) => {
    const shade = el("i", { class: "swatch area" });
    shade.style.backgroundColor = shadeOf((i / (SHADES - 1)) * WORST);
    return shade;
  });
  return el("p", { class: "scale-of" }, "loss 0", scale, `${WORST} nats and more, under the checkpoint of step ${count(checkpoint)}`);
}

const shadeOf = (loss) => `rgb(216 72 92 / ${(Math.min(loss / WORST, 1) * 0.55).toFixed(3)})`;

function documentOf({ document, corpus, shard, offset, tokens, loss, pieces }) {
  if (document === null) return el("p", { class: "quiet" }, `${count(tokens)} tokens of padding`);
  const facts = [`document ${corpus}:${document}`, `${count(tokens)} tokens from token ${count(offset)}`, shard, loss !== null ? `loss ${written(loss)}` : ""];
  const text = el("pre", { tabindex: "0", role: "region", "aria-label": `Text of document ${corpus}:${document} from token ${offset}` }, pieces.map(pieceOf));
  return el("div", { class: "document" }, el("p", { class: "quiet" }, facts.filter(Boolean).join(" \u00b7 ")), text, loss !== null ? readout(text, pieces) : "");
}

/** Return the line that tells the loss of one token of a text: the one that is tapped, or that the left and right arrow keys move to. */
function readout(text, pieces) {
  const said = el("p", { class: "readout", role: "status" }, "Tap a token, or move with the left and right arrow keys, for its loss.");
  let at = -1;
  const show = (i) => {
    text.children[at]?.classList.remove("at");
    text.children[i].classList.add("at");
    text.children[i].scrollIntoView({ block: "nearest" });
    at = i;
    const [token, , loss] = pieces[i];
    said.textContent = `${JSON.stringify(token)}: ${loss === null ? "no loss" : `loss ${written(loss)}`}`;
  };
  text.addEventListener("click", ({ target }) => { if (target !== text) show([...text.children].indexOf(target)); });
  text.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(Math.min(Math.max(at + move, 0), pieces.length - 1));
  });
  return said;
}

function pieceOf([text, learned, loss]) {
  const part = el("span", { class: learned ? "" : "unlearned", title: loss === null ? "" : `loss ${written(loss)}` }, text);
  if (loss !== null) part.style.backgroundColor = shadeOf(loss);
  return part;
}
