// The mixture under your hand: weights, the epochs that they mean, and requests to the running job.
//
// A corpus whose slider was moved has that share; the others keep their proportions in the rest, as with
// `penstock control RUN --weights`.

import * as api from "./api.js";
import { el, failure, quiet, quoted, table, throttled } from "../charts/dom.js";
import { ago, count, seconds, written } from "../charts/charts.js";

const POLL_MS = 1000, WRITE_MS = 1000;
/** Field of a corpus -> metric of the run's records. */
const RECORDED = [["tokens", "corpus_tokens"], ["epochs", "corpus_epochs"], ["loss", "corpus_validation_loss"]];
const ONLY_OF_A_JOB = new Set(["stop", "checkpoint"]);
const percent = (share) => (100 * share).toFixed(1) + "%";
const passes = (epochs) => (epochs === null || epochs === undefined ? "\u2013" : epochs.toFixed(epochs < 10 ? 2 : 1));

/** Return the weights of all corpora when some are set: the others share the rest in proportion. */
export function mixed(now, set) {
  const names = Object.keys(now), given = Object.values(set).reduce((sum, share) => sum + share, 0);
  const rest = names.filter((name) => !(name in set)), before = rest.reduce((sum, name) => sum + now[name], 0);
  const left = Math.max(1 - given, 0);
  return Object.fromEntries(names.map((name) => [name, name in set ? set[name] : before > 0 ? (left * now[name]) / before : left / rest.length]));
}

/** Return the shares to ask for: those that are set; all, if the others have none now, in whose proportions the rest is shared. */
function requested(now, set) {
  const isShared = Object.keys(now).some((name) => !(name in set) && now[name] > 0);
  return isShared ? set : mixed(now, set);
}

export class MixtureView {
  constructor(body, page) {
    Object.assign(this, { body, page, set: {} });
    this.preview = quiet(150, () => this.#preview());
    this.write = throttled(WRITE_MS, () => this.#write());
    this.load();
  }

  async load() {
    const [mixture, requests] = await Promise.allSettled([api.mixture(this.page.id), api.requests(this.page.id)]);
    if (this.isClosed) return;
    this.body.replaceChildren();
    if (mixture.status === "fulfilled" && mixture.value.corpora?.length) {
      this.#know(mixture.value);
      this.#build();
    } else this.body.append(mixture.status === "rejected" ? failure(mixture.reason) : el("p", { class: "empty" }, "This run has no mixture."));
    this.#actions();
    this.#requests(requests.status === "fulfilled" ? requests.value : { requests: [] });
  }

  /** Take over what a record has: tokens, epochs and held-out loss of each corpus. */
  points({ x, values }) {
    if (!this.mixture) return;
    this.mixture.step = x.step ?? this.mixture.step;
    for (const corpus of this.mixture.corpora)
      for (const [field, metric] of RECORDED) corpus[field] = values[`${metric}/${corpus.name}`] ?? corpus[field];
    this.write();
  }

  eventsRead() {
    this.again();
  }

  /** Read again what others may have changed; the reader's sliders stay. */
  async again() {
    const [mixture, requests] = await Promise.all([api.mixture(this.page.id).catch(() => null), api.requests(this.page.id).catch(() => null)]);
    if (this.isClosed || !this.list) return;  // or what was asked first is still to come
    if (mixture && this.mixture) this.#renew(mixture, this.set);
    if (requests) this.#requests(requests);
  }

  #know(mixture) {
    this.mixture = mixture;
    this.now = Object.fromEntries(mixture.corpora.map((corpus) => [corpus.name, corpus.weight]));
  }

  // A corpus that was added since has no row: it is shown when the view is opened again.
  #renew(mixture, set) {
    if (!mixture.corpora.every(({ name }) => this.cells.has(name))) return;
    this.#know(mixture);
    this.#propose(set);
    this.#write();
  }

  #write() {
    if (this.isClosed) return;
    const { step, steps, next_change: change, corpora } = this.mixture;
    this.left.textContent = `${count(Math.max(steps - step, 0))} steps are left${change ? `; the recipe changes it at step ${count(change)}` : ""}`;
    for (const { name, epochs, tokens, loss } of corpora) {
      const cell = this.cells.get(name);
      cell.epochs.textContent = passes(epochs);
      cell.tokens.textContent = written(tokens);
      cell.loss.textContent = written(loss);
    }
  }

  get #isAllowed() {
    return this.page.run.control && this.page.row.state !== "finished";
  }

  #build() {
    const { mixture } = this, isAlone = mixture.corpora.length < 2;
    this.cells = new Map();
    const rows = mixture.corpora.map((corpus, i) => {
      const id = `share-${i}`;
      const slider = el("input", { type: "range", id, min: "0", max: "100", step: "0.1", disabled: isAlone, on: { input: () => this.#move(corpus.name, slider.valueAsNumber / 100) } });
      const field = el("input", { type: "number", min: "0", max: "100", step: "0.1", disabled: isAlone, "aria-label": `Share of ${corpus.name}, percent`, on: { change: () => this.#move(corpus.name, Math.min(Math.max(field.valueAsNumber || 0, 0), 100) / 100) } });
      const swatch = el("i", { class: "swatch area" }), release = el("button", { type: "button", class: "plain", title: "let it share the rest again", on: { click: () => this.#release(corpus.name) } }, "release");
      swatch.style.background = `var(--c${i % 8})`;
      const cell = { slider, field, release, change: el("span", { class: "change" }), end: el("b"), epochs: el("dd"), tokens: el("dd"), loss: el("dd") };
      this.cells.set(corpus.name, cell);
      return el("div", { class: "corpus" },
        el("label", { for: id }, swatch, corpus.name), slider, el("span", { class: "share" }, field, "%"), cell.change, release,
        el("dl", {},
          el("div", {}, el("dt", {}, "epochs so far"), cell.epochs),
          el("div", {}, el("dt", {}, "by the end"), el("dd", {}, cell.end)),
          el("div", {}, el("dt", {}, "tokens so far"), cell.tokens),
          el("div", {}, el("dt", {}, "held-out loss"), cell.loss)));
    });
    this.stack = [el("div", { class: "stack" }), el("div", { class: "stack" })];
    const stacks = ["now", "set to"].map((name, i) => el("div", { class: "stack-row" }, el("span", { class: "quiet" }, name), this.stack[i]));
    this.apply = el("button", { type: "button", class: "button primary", disabled: true, on: { click: () => this.#confirm() } }, "Apply\u2026");
    this.undo = el("button", { type: "button", class: "button", disabled: true, on: { click: () => this.#propose({}) } }, "As it is now");
    this.reason = el("input", { type: "text", maxlength: "500", placeholder: "more code", "aria-label": "Reason" });
    this.command = el("code");
    this.said = el("p", { role: "status", class: "said-now" });
    this.left = el("p", { class: "quiet" });
    this.body.append(el("section", { class: "card mixture", "aria-label": "Mixture" },
      el("div", { class: "title" }, el("h2", {}, "Mixture"), this.left),
      el("div", { class: "stacks", "aria-hidden": "true" }, stacks), rows,
      el("div", { class: "toolbar end" }, el("label", {}, "Reason ", this.reason), this.undo, this.apply),
      this.said, el("p", { class: "quiet" }, "The same on a command line: ", this.command),
      this.#isAllowed ? "" : el("p", { class: "notice" }, this.page.run.control ? "The run is finished: there is nothing to change." : "This console is read-only. Start it with --control to send requests.")));
    this.#propose({});
    this.#write();
  }

  #move(name, share) {
    const others = Object.entries(this.set).filter(([other]) => other !== name);
    const isLast = others.length === Object.keys(this.now).length - 1;
    const set = Object.fromEntries(isLast ? others.slice(1) : others);  // one corpus at least takes up the rest
    const room = 1 - Object.values(set).reduce((sum, value) => sum + value, 0);
    this.#propose({ ...set, [name]: Math.max(Math.min(share, room), 0) });
  }

  #release(name) {
    const { [name]: _, ...set } = this.set;
    this.#propose(set);
  }

  #propose(set) {
    this.set = set;
    this.weights = mixed(this.now, set);
    const isChanged = Object.keys(this.now).some((name) => Math.abs(this.weights[name] - this.now[name]) > 5e-4);
    for (const [name, cell] of this.cells) {
      const share = this.weights[name], change = share - this.now[name];
      cell.slider.value = cell.field.value = (100 * share).toFixed(1);
      cell.slider.setAttribute("aria-valuetext", percent(share));
      cell.release.hidden = !(name in set);
      cell.change.textContent = Math.abs(change) < 5e-4 ? "" : `${change > 0 ? "+" : "\u2212"}${(100 * Math.abs(change)).toFixed(1)} points`;
    }
    this.stack.forEach((stack, i) => stack.replaceChildren(...Object.entries(i ? this.weights : this.now).map(([name, share], color) => {
      const part = el("span", { title: `${name} ${percent(share)}` }, share > 0.09 ? `${name} ${percent(share)}` : "");
      part.style.flexGrow = String(share);
      part.style.background = `var(--c${color % 8})`;
      return part;
    })));
    this.#writeEnds(this.mixture.corpora);
    this.apply.disabled = !isChanged || !this.#isAllowed;
    this.undo.disabled = !isChanged;
    const shares = Object.entries(requested(this.now, set)).map(([name, share]) => `${name}=${Number(share.toFixed(12))}`);
    this.command.textContent = `penstock control ${quoted(this.page.row.path || this.page.run.name)} --weights ${shares.length ? quoted(shares.join(",")) : "CORPUS=SHARE"}`;
    if (isChanged) this.preview();
  }

  // Epochs by the end: what the server computes; until it answers, by proportion.
  #writeEnds(corpora, isExact = false) {
    for (const corpus of corpora) {
      const own = this.mixture.corpora.find((one) => one.name === corpus.name), cell = this.cells.get(corpus.name);
      const more = (own.epochs_by_end ?? 0) - (own.epochs ?? 0), now = this.now[corpus.name];
      const share = this.weights[corpus.name], guess = now > 0 ? own.epochs + (more * share) / now : share > 0 ? null : own.epochs_by_end;
      const end = isExact ? corpus.epochs_by_end : own.epochs_by_end === null || own.epochs_by_end === undefined ? null : guess;
      cell.end.textContent = end === null ? "\u2013" : `${passes(end)} passes`;
      cell.end.className = end > 4 ? "much" : "";
      cell.end.title = end > 4 ? "After about four passes, repeated tokens teach less than new ones (Muennighoff et al., 2023)." : "";
    }
  }

  async #preview() {
    const weights = this.weights, found = await api.preview(this.page.id, weights).catch(() => null);
    if (found?.corpora && weights === this.weights) this.#writeEnds(found.corpora, true);
  }

  #confirm() {
    const lines = Object.keys(this.now).filter((name) => Math.abs(this.weights[name] - this.now[name]) > 5e-4).map((name) => `${name}: ${percent(this.now[name])} \u2192 ${percent(this.weights[name])}`);
    this.#send("Change the mixture?", lines, { weights: requested(this.now, this.set), reason: this.reason.value.trim() }, this.said);
  }

  /** Ask once, send, and follow the request until the job has answered; where it was pressed, say how it goes. */
  async #send(question, lines, request, place) {
    if (!(await this.#isConfirmed(question, lines))) return;
    try {
      const { number, said, running } = await api.request(this.page.id, request);
      place.replaceChildren(said || sentAs(number, Object.keys(request)[0], running));
      if (!said) this.#wait(number, place);
    } catch (error) {
      place.replaceChildren(error.message, error.status ? "" : " The request may have been sent: check the requests of this run before you send it again.");
    }
  }

  async #wait(number, place) {
    while (!this.isClosed) {
      const found = await api.requests(this.page.id).catch(() => null), own = found?.requests.find((request) => request.number === number);
      if (own?.reply) {
        const { reply } = own;
        if (own.kind === "mixture" && reply.taken_up && this.mixture) await this.#taken(reply, place);
        else place.replaceChildren(reply.said || (reply.taken_up ? "Taken up." : "Refused."));
        return this.#requests(found);  // with the way back to each mixture, so after the new one is known
      }
      if (found) this.#requests(found);
      if (own && !found.running) return place.replaceChildren(sentAs(number, own.kind, false));
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  async #taken(reply, place) {
    const found = await api.mixture(this.page.id).catch(() => null);
    if (found) this.#renew(found, {});
    this.now = { ...this.now, ...(reply.weights || this.weights) };
    this.#propose({});
    place.replaceChildren(`All ranks agreed: the change applies from step ${count((reply.holds_from ?? reply.step) + 1)}. `, this.#wayBack(reply, "Set the sliders as they were"));
  }

  /** Return a button that sets the sliders as they were before a request; "" if that is not known. */
  #wayBack(reply, text) {
    const before = this.mixture?.mixtures.filter((mixture) => mixture.after_step < reply.holds_from).at(-1)?.weights;
    if (!before) return "";
    return el("button", { type: "button", class: "button", on: { click: () => {
      const names = Object.keys(this.now);
      this.#propose(Object.fromEntries(names.slice(0, -1).map((name) => [name, before[name] ?? 0])));
      this.apply.focus();
    } } }, text);
  }

  #actions() {
    const act = (title, text, fields, request, hint) => {
      const inputs = fields.map(([name, label, value]) => [name, el("input", { type: "number", min: "1", step: "1", value: value ?? "", "aria-label": label, placeholder: label })]);
      const said = el("p", { role: "status", class: "said-now" }), button = el("button", { type: "submit", class: "button", disabled: !this.#isAllowed }, text);
      return el("form", { class: "action", on: { submit: (event) => {
        event.preventDefault();
        const values = Object.fromEntries(inputs.map(([name, input]) => [name, input.valueAsNumber]));
        const missing = inputs.find(([, input]) => !Number.isFinite(input.valueAsNumber));
        if (missing) return missing[1].focus();
        this.#send(`${title}?`, [hint, ...Object.entries(values).map(([name, value]) => `${name}: ${count(value)}`)], request(values), said);
      } } }, el("div", {}, el("h3", {}, title), el("p", { class: "quiet" }, hint)), inputs.map(([, input]) => input), button, said);
    };
    this.body.append(el("section", { class: "card", "aria-label": "Other requests" }, el("h2", {}, "Other requests"), el("div", { class: "actions" },
      act("Save a checkpoint now", "Save\u2026", [], () => ({ checkpoint: true }), "At the next step; training continues."),
      act("Stop after saving", "Stop\u2026", [], () => ({ stop: true }), "Saves a checkpoint and ends the job. penstock train resumes it."),
      act("Skip steps", "Skip\u2026", [["from", "first step"], ["to", "last step"]], ({ from, to }) => ({ skip_steps: [from, to + 1] }), "Their samples are left out, on all ranks."),
      act("Islands", "Restart\u2026", [["islands", "islands"]], (values) => values, "The job restarts with this number of islands after their next sync."),
      act("Batch size", "Set\u2026", [["batch", "rows a step"]], ({ batch }) => ({ batch_size: batch }), "Rows of a step. All ranks agree on the first step with the new size."))));
    this.list = el("section");
    this.body.append(this.list);
  }

  #requests({ requests, running }) {
    const listed = JSON.stringify([requests, running, this.mixture?.mixtures]);
    if (listed === this.listed) return;  // a button that is being pressed stays
    this.listed = listed;
    const replied = ({ kind, reply }) => [el("span", { class: reply.taken_up ? "good" : "bad" }, reply.said || (reply.taken_up ? `from step ${count(reply.holds_from + 1)}` : "refused")),
      kind === "mixture" && reply.taken_up && this.#isAllowed ? this.#wayBack(reply, "Set the sliders as before it") : ""];
    const rows = [...requests].reverse().map((request) => [`${request.number}`, request.text ?? request.kind, el("span", {}, request.asked_by || "\u2013", request.time ? el("small", {}, ` ${ago(seconds(request.time))}`) : ""),
      request.reply ? el("div", { class: "replied" }, replied(request)) : el("span", { class: "open" }, running ? "waiting for the job" : "waiting for the next start"), request.reason || ""]);
    this.list.replaceChildren(el("h2", {}, "Requests of this run"), rows.length ? table("Requests of this run", ["number", "what", "asked by", "answer", "reason"], rows, { className: "wordy" }) : el("p", { class: "quiet" }, "None yet."));
  }

  /** Ask in a dialog, which ends with the view; true if the reader agrees. */
  #isConfirmed(question, lines) {
    return new Promise((resolve) => {
      this.dialog = el("dialog", { "aria-labelledby": "asked" },
        el("form", { method: "dialog" }, el("h2", { id: "asked" }, `${this.page.run.name}: ${question}`), el("ul", {}, lines.map((line) => el("li", {}, line))),
          el("p", { class: "quiet" }, "The run\u2019s record keeps the request."),
          el("div", { class: "toolbar end" }, el("button", { class: "button", value: "" }, "Cancel"), el("button", { class: "button primary", value: "yes" }, "Yes, send it"))));
      this.dialog.addEventListener("close", (event) => {
        event.target.remove();
        resolve(event.target.returnValue === "yes");
      });
      document.body.append(this.dialog);
      this.dialog.showModal();
    });
  }

  close() {
    this.isClosed = true;
    this.dialog?.close();
  }
}

function sentAs(number, kind, isRunning) {
  const then = isRunning ? "Waiting for the ranks to agree on a step\u2026"
    : ONLY_OF_A_JOB.has(kind) ? "The job has ended: the next job refuses the request." : "No job runs: the request applies when the run is started again.";
  return `Request ${number} is sent. ${then}`;
}
