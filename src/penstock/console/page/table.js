// The runs: a table that sorts, filters, groups and searches. Only the rows in sight are elements.

import * as api from "./api.js";
import { el, pill, quiet } from "../charts/dom.js";
import { ago, count, duration, seconds, written } from "../charts/charts.js";
import { bar } from "../charts/run.js";

const STATES = ["training", "stalled", "failed", "stopped", "finished"];
const MARGIN_ROWS = 8, ROWS_AT_ONCE = 6;
const MOST_COMPARED = 8;

/** Columns: key of a row, title, how it is written, its hint; numbers sort from the largest at first. */
const COLUMNS = [
  ["name", "run", null, ""],
  ["state", "state", null, "training, stalled (no record for long), stopped, finished, failed"],
  ["step", "step", null, "optimizer steps taken, of those the recipe asks for"],
  ["loss", "loss", (row) => written(row.loss), "training loss of the last step"],
  ["tokens_per_s", "tokens/s", (row) => written(row.tokens_per_s), "of the last step, all ranks"],
  ["mfu", "MFU", (row) => written(row.mfu, "share"), "model FLOPs utilisation"],
  ["data_wait", "data wait", (row) => written(row.data_wait, "share"), "share of a step spent waiting for its batch"],
  ["exposed", "exposed", (row) => written(row.exposed, "share"), "share of a step blocked on communication"],
  ["eta_s", "ETA", (row) => (row.state === "training" ? duration(row.eta_s) : "\u2013"), "time until the last step"],
  ["cost", "cost", (row) => written(row.cost), "cost so far"],
  ["updated", "updated", (row) => ago(row.updated), "time since its last record"],
];
const GROUPS = [["", "no groups"], ["state", "by state"], ["folder", "by folder"], ["ranks", "by ranks"]];

const folder = (row) => (row.path || "").replace(/[\\/][^\\/]*$/, "") || ".";
const groupOf = { state: (row) => row.state, folder, ranks: (row) => (row.ranks ? `${row.ranks} ranks` : "ranks unknown") };

/** Return how far a row is outside those in sight. */
const outside = (i, [first, past]) => Math.max(first - i, i - past + 1, 0);

/** Return the order of two texts: letters of either case together, numbers by their size. */
function compared(a, b) {
  const [x, y] = [a, b].map((text) => text.toLowerCase().split(/([0-9]+)/));
  for (let i = 0; i < Math.min(x.length, y.length); i++) {
    const [p, q] = i % 2 ? [x[i], y[i]].map((digits) => digits.replace(/^0+/, "")) : [x[i], y[i]];
    if (i % 2 && p.length !== q.length) return p.length - q.length;
    if (p !== q) return p < q ? -1 : 1;
  }
  return x.length - y.length;
}

/** Return the order of two rows; what is unknown comes last either way. */
function ordered(key, isDown) {
  const known = (value) => value !== null && value !== undefined && value !== "";
  const value = (row) => (key === "updated" ? seconds(row[key]) : key === "state" ? STATES.indexOf(row.state) : row[key]);
  return (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (!known(x) || !known(y)) return known(y) - known(x);
    const order = typeof x === "string" ? compared(x, y) : x - y;
    return isDown ? -order : order;
  };
}

export async function open(query) {
  return new RunsTable(await api.runs(query.get("search") || ""), query);
}

class RunsTable {
  constructor(rows, query) {
    this.rows = new Map(rows.map((row) => [row.id, row]));
    this.sort = query.get("sort") || "updated";
    this.isDown = query.get("down") !== "0";
    this.states = new Set((query.get("states") || "").split(",").filter(Boolean));
    this.group = Object.hasOwn(groupOf, query.get("group") || "") ? query.get("group") : "";
    this.text = query.get("search") || "";
    this.picked = new Set();
    this.made = new Map();
    this.others = new Set();  // ids of runs that came after the search, and were searched for
    this.title = "Runs";
    this.#build();
  }

  #build() {
    this.chips = new Map(STATES.map((state) => [state, el("button", { type: "button", class: `chip ${state}`, on: { click: () => {
      if (!this.states.delete(state)) this.states.add(state);
      this.draw();
    } } })]));
    this.field = el("input", {
      type: "search", placeholder: "Search names and recipes", "aria-label": "Search names and recipes", value: this.text,
      on: { input: quiet(200, () => this.search()) },
    });
    const group = el("select", { "aria-label": "Group", on: { change: () => { this.group = group.value; this.draw(); } } },
      GROUPS.map(([value, text]) => el("option", { value, selected: value === this.group }, text)));
    const sort = el("select", { class: "narrow-only", "aria-label": "Sort", on: { change: () => this.sortBy(sort.value) } },
      COLUMNS.map(([key, title]) => el("option", { value: key, selected: key === this.sort }, "by " + title)));
    this.direction = el("button", { type: "button", class: "button narrow-only", "aria-label": "Descending", on: { click: () => { this.isDown = !this.isDown; this.draw(); } } });
    this.compare = el("a", { class: "button primary", hidden: true });
    this.head = el("div", { class: "row head", role: "row" }, el("span", { role: "columnheader", class: "pick" }, el("span", { class: "unseen" }, "chosen")),
      COLUMNS.map(([key, title, , hint]) => {
        const button = el("button", { type: "button", title: hint, on: { click: () => this.sortBy(key) } }, title);
        return el("span", { role: "columnheader", class: key, dataset: { key } }, button);
      }));
    this.space = el("div", { class: "space", role: "rowgroup" });
    this.grid = el("div", { class: "runs", role: "table", "aria-label": "Runs" }, el("div", { role: "rowgroup" }, this.head), this.space);
    this.view = el("div", { class: "runs-scroll", tabindex: "0", role: "region", "aria-label": "Table of runs" }, this.grid);
    this.view.addEventListener("scroll", () => this.#ask(), { passive: true });
    this.note = el("p", { class: "quiet", role: "status" });
    this.root = el("div", { class: "page runs-page" },
      el("div", { class: "title" }, el("h1", {}, "Runs"), this.note, this.compare),
      el("div", { class: "toolbar" }, el("div", { class: "chips", role: "group", "aria-label": "States shown" }, ...this.chips.values()), el("div", { class: "space-between" }), this.field, group, sort, this.direction), this.view);
  }

  begin() {
    this.sized = new ResizeObserver(() => this.#ask());
    this.sized.observe(this.view);
    this.clock = setInterval(() => this.#paint(true), 10_000);
    this.draw();
    this.end = api.follow([], { row: (row) => this.#take(() => this.update(row.row ?? row)), gone: ({ id }) => this.#take(() => this.#remove(id)), reset: () => this.search() });
  }

  close() {
    this.isClosed = true;
    this.end?.();
    this.sized?.disconnect();
    clearInterval(this.clock);
  }

  async search() {
    const mine = (this.turn = (this.turn || 0) + 1);
    const text = this.field.value.trim();
    if (text !== this.text) this.others.clear();
    this.text = text;
    this.meanwhile = [];
    const found = await api.runs(this.text).catch(() => null);
    if (mine !== this.turn) return;  // the reader has typed on
    if (found) {
      this.rows = new Map(found.map((row) => [row.id, row]));
      for (const act of this.meanwhile) act();
    }
    this.meanwhile = null;
    this.draw();
  }

  // An answer that is on its way may be older than what the stream tells.
  #take(act) {
    this.meanwhile?.push(act);
    act();
  }

  update(row) {
    const isNew = !this.rows.has(row.id);
    if (isNew && this.text) {
      if (!this.others.has(row.id)) this.#searchAgain();
      this.others.add(row.id);
      return;
    }
    this.rows.set(row.id, { ...this.rows.get(row.id), ...row });
    this.#askDraw();
  }

  #remove(id) {
    this.rows.delete(id);
    if (this.picked.delete(id)) this.#writeCompare();
    this.#askDraw();
  }

  #askDraw = quiet(100, () => this.draw());
  #searchAgain = quiet(100, () => this.search());

  sortBy(key) {
    this.isDown = this.sort === key ? !this.isDown : !["name", "state"].includes(key);
    this.sort = key;
    this.draw();
  }

  draw() {
    if (this.isClosed) return;  // a timer's: the address is another view's by now
    for (const cell of this.head.querySelectorAll("[data-key]")) {
      if (cell.dataset.key === this.sort) cell.setAttribute("aria-sort", this.isDown ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    this.direction.textContent = this.isDown ? "\u2193" : "\u2191";
    this.direction.setAttribute("aria-pressed", String(this.isDown));
    const all = [...this.rows.values()], count = (state) => all.filter((row) => row.state === state).length;
    for (const [state, chip] of this.chips) {  // in place: the one that is pressed keeps the focus
      chip.hidden = !count(state) && !this.states.has(state);
      chip.setAttribute("aria-pressed", String(this.states.has(state)));
      chip.replaceChildren(el("b", {}, count(state).toLocaleString("en")), " " + state);
    }
    const shown = all.filter((row) => !this.states.size || this.states.has(row.state)).sort(ordered(this.sort, this.isDown));
    this.note.textContent = shown.length === all.length ? `${all.length.toLocaleString("en")} in all` : `${shown.length.toLocaleString("en")} of ${all.length.toLocaleString("en")}`;
    this.items = shown;
    if (this.group) {
      const groups = Map.groupBy ? Map.groupBy(shown, groupOf[this.group]) : grouped(shown, groupOf[this.group]);
      this.items = [...groups].flatMap(([name, rows]) => [{ group: name, number: rows.length }, ...rows]);
    }
    this.grid.setAttribute("aria-rowcount", this.items.length + 1);
    this.#remember();
    this.#paint(true);
  }

  // The address holds what is shown, so that it is a link; without a new entry in the browser's history.
  #remember() {
    if (!/^(#\/?(\?.*)?)?$/.test(location.hash)) return;  // the reader has left: the next view opens in a moment
    const values = { search: this.text, sort: this.sort === "updated" ? "" : this.sort, down: this.isDown ? "" : "0", states: [...this.states].join(","), group: this.group };
    const given = Object.entries(values).filter(([, value]) => value);
    history.replaceState(null, "", "#/" + (given.length ? "?" + new URLSearchParams(given) : ""));
  }

  #ask() {
    if (this.asked) return;
    this.asked = requestAnimationFrame(() => {
      this.asked = 0;
      this.#paint(false);
    });
  }

  // Rows that stay in sight and do not change stay as they are, but for their age. Those in sight are made first, and
  // few at once while the reader scrolls: a task of many rows would hold up the scrolling.
  #paint(isNew) {
    if (!this.items || this.isClosed) return;
    const height = parseFloat(getComputedStyle(this.grid).getPropertyValue("--row")) || 44, { scrollTop, clientHeight } = this.view;
    const seen = [Math.floor(scrollTop / height), Math.min(Math.ceil((scrollTop + clientHeight) / height), this.items.length)];
    const first = Math.max(seen[0] - MARGIN_ROWS, 0), last = Math.min(seen[1] + MARGIN_ROWS, this.items.length);
    const focused = this.space.contains(document.activeElement) ? document.activeElement.dataset.of : null;
    const isMoved = height !== this.height, isAnew = isNew || isMoved;
    this.height = height;
    this.space.style.height = this.items.length * height + "px";
    for (const [i, made] of this.made)
      if (isMoved || i < first || i >= last || (isNew && made.shows !== JSON.stringify(this.items[i]))) {
        made.remove();
        this.made.delete(i);
      } else if (isNew) made.querySelector(".updated")?.replaceChildren(ago(this.items[i].updated));
    const missing = [];
    for (let i = first; i < last; i++) if (!this.made.has(i)) missing.push(i);
    missing.sort((a, b) => outside(a, seen) - outside(b, seen));
    const number = isAnew ? Math.max(seen[1] - Math.max(seen[0], 0), ROWS_AT_ONCE) : ROWS_AT_ONCE;
    for (const i of missing.slice(0, number)) this.#put(i);
    if (isAnew) {
      this.space.querySelector(".empty")?.parentElement.remove();
      if (!this.items.length) this.space.append(el("div", { role: "row" }, el("p", { class: "empty", role: "cell" }, this.rows.size || this.text ? "No run matches." : "No run in these folders yet. It appears here with its first record.")));
    }
    if (isAnew && focused) {
      const i = this.items.findIndex(({ id }) => focused.endsWith(" " + id));
      if (i >= first && i < last && !this.made.has(i)) this.#put(i);
      this.space.querySelector(`[data-of="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    }
    if (missing.length > number) this.#ask();
  }

  #put(i) {
    const row = this.items[i];
    const made = row.group === undefined ? this.#row(row) : el("div", { class: "row group", role: "row" }, el("span", { role: "cell" }, row.group, el("small", {}, String(row.number))));
    made.style.top = i * this.height + "px";
    made.setAttribute("aria-rowindex", i + 2);
    made.shows = JSON.stringify(row);
    let after = null;  // in the order of the table, which the keyboard follows
    for (const [other, element] of this.made) if (other > i && (!after || other < after[0])) after = [other, element];
    this.space.insertBefore(made, after && after[1]);
    this.made.set(i, made);
  }

  #row(row) {
    const pick = el("input", { type: "checkbox", "aria-label": `Compare ${row.name}`, checked: this.picked.has(row.id), dataset: { of: "pick " + row.id }, on: { change: () => this.#pick(row.id, pick) } });
    const cells = COLUMNS.map(([key, title, write]) => {
      const cell = el("span", { role: "cell", class: key, dataset: { title } });
      if (key === "name") cell.append(el("a", { href: `#/run/${encodeURIComponent(row.id)}`, dataset: { of: "name " + row.id }, title: row.path || "" }, row.name), el("small", {}, row.error || folder(row)));
      else if (key === "state") cell.append(pill(row.state));
      else if (key === "step") cell.append(el("span", {}, count(row.step), row.steps ? el("small", {}, " / " + count(row.steps)) : ""), bar(row));
      else cell.append(write(row));
      return cell;
    });
    return el("div", { class: "row" + (this.picked.has(row.id) ? " picked" : ""), role: "row" }, el("span", { role: "cell", class: "pick" }, pick), cells);
  }

  #pick(id, box) {
    if (box.checked && this.picked.size >= MOST_COMPARED) box.checked = false;
    if (box.checked) this.picked.add(id);
    else this.picked.delete(id);
    box.closest(".row").classList.toggle("picked", box.checked);
    this.#writeCompare();
  }

  #writeCompare() {
    this.compare.hidden = this.picked.size < 1;
    this.compare.textContent = this.picked.size < 2 ? "Choose another to compare" : `Compare ${this.picked.size} runs`;
    if (this.picked.size < 2) this.compare.removeAttribute("href");
    else this.compare.href = "#/compare?runs=" + [...this.picked].map(encodeURIComponent).join(",");
  }
}

function grouped(rows, by) {
  const found = new Map();
  for (const row of rows) found.set(by(row), [...(found.get(by(row)) || []), row]);
  return found;
}
