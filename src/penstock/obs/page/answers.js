// The model's answers to fixed prompts, checkpoint beside checkpoint: those recorded in training, and any others on request.

import { el, failure, throttled } from "./dom.js";
import { count } from "./charts.js";

const RENEW_MS = 3000;  // of the list of checkpoints, while the reader is at the form
const SHOWN = 3, MOST_CHECKPOINTS = 8, MOST_PROMPTS = 10;

export class AnswersView {
  constructor(body, page) {
    Object.assign(this, { page, source: page.source });
    this.recorded = el("div", { class: "view" });
    this.asked = el("section", { class: "card" });
    body.append(this.recorded);
    if (this.source.isLive) body.append(this.asked);
    this.load().then(() => this.source.isLive && this.#form());
  }

  async load() {
    try {
      this.found = await this.source.answers(this.page.id);
    } catch (error) {
      return this.recorded.replaceChildren(failure(error));
    }
    const { steps, prompts } = this.found;
    if (!steps?.length) return this.recorded.replaceChildren(el("p", { class: "empty" }, "This run has no sample prompts. Add them to [samples] in the recipe to see how the answers change."));
    if (!this.isChosen) this.shown = few(steps);
    const place = el("div", { class: "view" });
    const draw = () => place.replaceChildren(...sideBySide(steps.filter((step) => this.shown.has(step)), prompts));
    this.recorded.replaceChildren(el("div", { class: "toolbar" }, choices("Checkpoints shown", steps, this.shown, () => {
      this.isChosen = true;
      draw();
    })), place);
    draw();
  }

  async #form() {
    let found;
    try {
      found = await this.source.checkpoints(this.page.id);
    } catch (error) {
      return this.asked.replaceChildren(failure(error));
    }
    const title = el("h2", {}, "Ask other checkpoints");
    if (found.why_not) return this.asked.replaceChildren(title, el("p", { class: "quiet" }, found.why_not));
    let { steps } = found;
    const chosen = few(steps), asked = el("div", { class: "place" }, choices("Checkpoints asked", steps, chosen, () => {}));
    const renew = throttled(RENEW_MS, async () => {
      const newer = await this.source.checkpoints(this.page.id).catch(() => null);
      if (!newer || newer.steps.join() === steps.join()) return;
      steps = newer.steps;
      for (const step of chosen) if (!steps.includes(step)) chosen.delete(step);
      asked.replaceChildren(choices("Checkpoints asked", steps, chosen, () => {}));
    });
    const prompts = el("textarea", { rows: "3", value: "", required: true }), tokens = el("input", { type: "number", min: "1", max: "4096", value: "64" });
    prompts.value = (this.found?.prompts || []).map(({ prompt }) => prompt.replaceAll("\n", " ")).slice(0, MOST_PROMPTS).join("\n");
    const chats = el("input", { type: "checkbox" }), ask = el("button", { type: "submit", class: "button primary" }, "Ask them");
    const said = el("p", { class: "quiet", role: "status" }), place = el("div", { class: "view" });
    this.asked.replaceChildren(title,
      el("form", { class: "say", on: { pointerenter: renew, focusin: renew, submit: (event) => {
        event.preventDefault();
        this.#ask({ steps: steps.filter((step) => chosen.has(step)), prompts: prompts.value.split("\n").filter((line) => line.trim()), mode: chats.checked ? "chat" : "text", max_tokens: Number(tokens.value) }, { ask, said, place });
      } } },
        el("label", {}, `Prompts, one a line, at most ${MOST_PROMPTS}`, prompts), asked,
        el("div", { class: "toolbar" }, ask, el("label", {}, "Tokens ", tokens), el("label", {}, chats, " with the chat template"))), said, place);
  }

  async #ask(wanted, { ask, said, place }) {
    if (!wanted.steps.length || wanted.steps.length > MOST_CHECKPOINTS) return (said.textContent = `Choose one to ${MOST_CHECKPOINTS} checkpoints.`);
    if (wanted.prompts.length > MOST_PROMPTS) return (said.textContent = `At most ${MOST_PROMPTS} prompts.`);
    this.asking?.abort();
    const asking = (this.asking = new AbortController()), done = [], failures = [];
    ask.disabled = true;
    place.replaceChildren();
    const next = () => { said.textContent = done.length + failures.length < wanted.steps.length ? `Checkpoint ${done.length + failures.length + 1} of ${wanted.steps.length}\u2026` : ""; };
    next();
    try {
      await this.source.answersOf(this.page.id, wanted, { answers: (one) => {
        if (one.error) failures.push(failure(new Error(`Step ${count(one.step)}: ${one.error}`)));
        else done.push(one);
        next();
        const prompts = wanted.prompts.map((prompt, i) => ({ prompt, answers: done.map(({ step, answers }) => ({ step, ...answers[i] })) }));
        place.replaceChildren(...failures, ...(done.length ? sideBySide(done.map(({ step }) => step), prompts, "h3") : []));
      } }, asking.signal);
    } catch (error) {
      if (!asking.signal.aborted) place.append(failure(error));
    }
    said.textContent = "";
    ask.disabled = false;
  }

  again() {
    this.load();
  }

  samples() {
    this.load();
  }

  close() {
    this.asking?.abort();
  }
}

/** Return the first, the middle and the last of many checkpoints. */
const few = (steps) => new Set(steps.length <= SHOWN ? steps : [steps[0], steps[steps.length >> 1], steps[steps.length - 1]]);

function choices(label, steps, chosen, act) {
  return el("div", { class: "chips", role: "group", "aria-label": label }, steps.map((step) => el("button", {
    type: "button", class: "chip", "aria-pressed": String(chosen.has(step)), on: { click: (event) => {
      if (!chosen.delete(step)) chosen.add(step);
      event.currentTarget.setAttribute("aria-pressed", String(chosen.has(step)));
      act();
    } } }, step ? `step ${count(step)}` : "before")));
}

function sideBySide(steps, prompts, heading = "h2") {
  return prompts.map((prompt) => {
    const grid = el("div", { class: "answers" }, steps.map((step) => {
      const answer = prompt.answers.find((one) => one.step === step);
      return el("section", { class: "answer" }, el("h3", {}, step ? `step ${count(step)}` : "before training"),
        el("p", { class: "said", tabindex: "0" }, answer ? answer.answer : "\u2013", answer?.cut ? el("span", { class: "quiet", title: "The answer reached the token limit" }, "\u2026") : ""));
    }), prompt.reference ? el("section", { class: "answer reference" }, el("h3", {}, "the document itself"), el("p", { class: "said", tabindex: "0" }, prompt.reference)) : "");
    return el("article", { class: heading === "h2" ? "card" : "document" }, el(heading, { class: "prompt" }, prompt.prompt), grid);
  });
}
