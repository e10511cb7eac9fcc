// A chat with a checkpoint, or a text that it continues; the model is opened by the first message.

import * as api from "./api.js";
import { Chat } from "../charts/chat.js";
import { el, failure, segments, throttled } from "../charts/dom.js";
import { count } from "../charts/charts.js";

const RENEW_MS = 3000;  // of the list of checkpoints, while the reader is at it

export class ChatView {
  constructor(body, page, query) {
    Object.assign(this, { body, page, mode: query.get("mode") === "text" ? "text" : "chat", wanted: Number(query.get("step")) });
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
    const number = (options) => el("input", { type: "number", ...options }), renew = throttled(RENEW_MS, () => this.#renew());
    this.step = el("select", { on: { change: () => this.chat.begin(), pointerenter: renew, focus: renew } });
    this.#list(found.steps, this.wanted);
    this.tokens = number({ min: "1", max: "4096", value: "200" });
    this.warmth = number({ min: "0", max: "2", step: "0.1", value: "0.8" });
    this.hello = el("p", { class: "quiet" });
    const log = el("div", { class: "talk", role: "log", "aria-live": "polite", "aria-label": "Conversation", tabindex: "0" }, this.hello);
    const field = el("textarea", { rows: "1", "aria-label": "Message" }), send = el("button", { type: "submit", class: "button primary" }, "Send");
    const form = el("form", { class: "say" }, field, el("div", { class: "toolbar" }, send, el("button", { type: "button", class: "button", on: { click: () => this.chat.begin() } }, "Forget it")));
    this.chat = new Chat({ log, hello: this.hello, form, field, send }, { name: () => `step ${count(Number(this.step.value))}`, isContinued: () => this.mode === "chat", request: (messages) => this.#request(messages) });
    this.body.replaceChildren(
      el("div", { class: "toolbar" }, el("label", {}, "Checkpoint ", this.step),
        segments("What to do", [["chat", "Chat"], ["text", "Continue a text"]], this.mode, (mode) => this.#turn(mode)),
        el("label", {}, "Tokens ", this.tokens), el("label", {}, "Temperature ", this.warmth)),
      el("section", { class: "card" }, el("h2", { class: "unseen" }, "Conversation"), log, form),
      el("p", { class: "quiet", role: "status" }, `${found.open ? `This console ${found.open}. ` : ""}The first message opens the checkpoint in this machine\u2019s memory; it is closed after five minutes without use.`));
    this.#turn(this.mode);
  }

  async #renew() {
    const found = await api.checkpoints(this.page.id).catch(() => null);
    if (found && !this.isClosed) this.#list(found.steps, Number(this.step.value));
  }

  // A checkpoint that was deleted stays in the list while it is chosen: the conversation names it.
  #list(steps, chosen) {
    const shown = [...new Set(this.step.options.length ? [...steps, chosen] : steps)].sort((a, b) => b - a);
    if (shown.join() === [...this.step.options].map(({ value }) => value).join()) return;
    this.step.replaceChildren(...shown.map((step) => el("option", { value: step, selected: step === chosen }, `step ${count(step)}`)));
  }

  #turn(mode) {
    this.mode = mode;
    this.hello.textContent = mode === "chat" ? "Say something to the model." : "Write the beginning of a text: the model continues it.";
    this.chat.begin();
  }

  #request(messages) {
    const body = { max_tokens: Number(this.tokens.value), temperature: Number(this.warmth.value) };
    return { address: api.modelAddress(this.page.id, this.step.value, this.mode), headers: {}, body: { ...body, ...(this.mode === "chat" ? { messages } : { prompt: messages[0].content }) } };
  }

  close() {
    this.isClosed = true;
    this.chat?.stop();
  }
}
