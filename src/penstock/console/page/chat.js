// A chat with a checkpoint, or a text that it continues; the model is opened by the first message.

import * as api from "./api.js";
import { el, failure, segments } from "../charts/dom.js";
import { count } from "../charts/charts.js";

export class ChatView {
  constructor(body, page, query) {
    Object.assign(this, { body, page, messages: [], mode: query.get("mode") === "text" ? "text" : "chat", wanted: Number(query.get("step")) });
    this.load();
  }

  async load() {
    let found;
    try {
      found = await api.checkpoints(this.page.id);
    } catch (error) {
      return this.body.replaceChildren(failure(error));
    }
    if (this.isClosed) return;
    if (found.why_not) return this.body.replaceChildren(el("p", { class: "empty" }, found.why_not));
    const steps = [...found.steps].reverse();
    this.step = el("select", { on: { change: () => this.#forget() } }, steps.map((step) => el("option", { value: step, selected: step === this.wanted }, `step ${count(step)}`)));
    this.tokens = el("input", { type: "number", min: "1", max: "4096", value: "200" });
    this.warmth = el("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0.8" });
    this.log = el("div", { class: "talk", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.field = el("textarea", { rows: "3", "aria-label": "Message", required: true, on: { keydown: (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.form.requestSubmit(); }
    } } });
    this.send = el("button", { type: "submit", class: "button primary" }, "Send");
    this.stop = el("button", { type: "button", class: "button", hidden: true, on: { click: () => this.asking?.abort() } }, "Stop");
    this.said = el("p", { class: "quiet", role: "status" }, `${found.open ? `This console ${found.open}. ` : ""}The first message opens the checkpoint in this machine\u2019s memory; it is closed after five minutes without use.`);
    this.form = el("form", { class: "say", on: { submit: (event) => { event.preventDefault(); this.#ask(); } } }, this.field,
      el("div", { class: "toolbar" }, this.send, this.stop, el("button", { type: "button", class: "button", on: { click: () => this.#forget() } }, "Forget it")));
    this.body.replaceChildren(
      el("div", { class: "toolbar" }, el("label", {}, "Checkpoint ", this.step),
        segments("What to do", [["chat", "Chat"], ["text", "Continue a text"]], this.mode, (mode) => { this.mode = mode; this.#forget(); }),
        el("label", {}, "Tokens ", this.tokens), el("label", {}, "Temperature ", this.warmth)),
      el("section", { class: "card" }, el("h2", { class: "unseen" }, "Conversation"), this.log, this.form), this.said);
    this.#forget();
  }

  #forget() {
    this.asking?.abort();
    this.messages = [];
    this.log.replaceChildren(el("p", { class: "quiet" }, this.mode === "chat" ? "Say something to the model." : "Write the beginning of a text: the model continues it."));
  }

  async #ask() {
    const text = this.field.value;
    if (!text.trim() || this.asking) return;
    if (!this.messages.length || this.mode === "text") this.log.replaceChildren();
    const asked = [...(this.mode === "chat" ? this.messages : []), { role: "user", content: text }];
    const answer = el("span"), line = el("div", { class: "turn" }, el("h3", {}, `step ${count(Number(this.step.value))}`), el("p", { class: "said" }, this.mode === "text" ? el("b", {}, text) : "", answer));
    this.log.append(this.mode === "chat" ? el("div", { class: "turn own" }, el("h3", {}, "you"), el("p", { class: "said" }, text)) : "", line);
    if (this.mode === "chat") this.field.value = "";
    const asking = (this.asking = new AbortController());
    [this.send.disabled, this.stop.hidden] = [true, false];
    this.said.textContent = "Opening the checkpoint, or computing the prompt\u2026";
    try {
      await api.chat(this.page.id, { step: Number(this.step.value), mode: this.mode, messages: asked, max_tokens: Number(this.tokens.value), temperature: Number(this.warmth.value) },
        { text: (data) => {
          this.said.textContent = data.finish === "length" ? "The answer reached its limit of tokens." : "";
          answer.append(data.text);
          this.log.scrollTop = this.log.scrollHeight;
        } }, asking.signal);
      if (!asking.signal.aborted && this.mode === "chat") this.messages = [...asked, { role: "assistant", content: answer.textContent }];
    } catch (error) {
      this.said.textContent = "";
      if (asking.signal.aborted) answer.append(el("span", { class: "quiet" }, " (stopped)"));
      else {
        line.replaceWith(failure(error));
        if (this.mode === "chat") this.field.value = text;
      }
    }
    this.asking = null;
    [this.send.disabled, this.stop.hidden] = [false, true];
    if (!this.isClosed) this.field.focus();
  }

  close() {
    this.isClosed = true;
    this.asking?.abort();
  }
}
