// A chat over the API of OpenAI: streams answers, stops them, asks again. Text only ever becomes text nodes.

import { el } from "./dom.js";

// What a person is told of an error; of a lost connection each browser says something else.
export const words = (error) => (error instanceof TypeError ? "The server cannot be reached, or went away." : error.message);

/** Return the error of a response that is none of 200. */
export async function problem(response) {
  const said = (await response.json().catch(() => null))?.error;
  return new Error(said?.message ?? said ?? `The server answered ${response.status}.`);
}

export class Chat {
  #stopping = null;  // an AbortController while an answer is written

  /**
   * Args: parts: elements of the page: log, hello (shown in it while it is empty), form, field, send.
   * options: name(): whose the next answer is; request(messages): { address, headers, body } that asks for the next one;
   * isContinued(): false: each text is continued by itself; keep(messages): called when they have changed.
   */
  constructor(parts, options) {
    Object.assign(this, { parts, messages: [], isContinued: () => true, keep: () => {}, ...options });
    const { form, field } = parts;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const question = field.value.trim();
      if (this.#stopping) this.stop();
      else if (question) {
        field.value = "";
        this.#grow();
        this.#ask(question);
      }
    });
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#stopping) form.requestSubmit();
    });
    field.addEventListener("input", () => this.#grow());
  }

  stop() {
    this.#stopping?.abort();
  }

  /** Forget the conversation. */
  begin() {
    this.stop();
    this.messages = [];
    this.keep(this.messages);
    for (const turn of this.#turns()) turn.remove();
    this.parts.hello.hidden = false;
    this.parts.field.focus();
  }

  /** Show a conversation, unless one has begun. */
  restore(messages) {
    if (this.messages.length) return;
    this.messages = messages;
    messages.forEach(({ role, content, by }, i) => this.#addTurn(role, content, role === "user" ? i : i - 1, by));
    this.parts.log.scrollTop = this.parts.log.scrollHeight;
  }

  #turns() {
    return [...this.parts.log.querySelectorAll(".turn")];
  }

  // `index` is that of the question in `messages`, also for its answer.
  #addTurn(role, content, index, by = this.name()) {
    this.parts.hello.hidden = true;
    const isOwn = role === "user", text = el("div", { class: "text" }), action = (name, act) => el("button", { type: "button", class: "plain", on: { click: ({ target }) => act(target) } }, name);
    const turn = el("article", { class: `turn ${role}` }, el("span", { class: "who" }, isOwn ? "You" : by), text, el("p", { class: "note" }),
      el("p", { class: "actions" }, isOwn ? action("Edit", () => this.#edit(turn)) : action("Retry", () => this.#retry(turn)), action("Copy", (button) => copy(turn, button))));
    Object.assign(turn, { index, said: content, by });
    isOwn ? (text.textContent = content) : show(text, content);
    this.parts.log.append(turn);
    return turn;
  }

  // Takes the conversation back to before a turn's question; returns that question.
  #takeBack(turn) {
    const turns = this.#turns(), before = turns.slice(0, turns.indexOf(turn) + 1);  // after a failed one, two questions have one index
    const question = before.findLast((one) => one.classList.contains("user"));
    for (const one of turns.slice(turns.indexOf(question))) one.remove();
    this.messages = this.messages.slice(0, turn.index);
    this.keep(this.messages);
    return question.said;
  }

  #edit(turn) {
    if (this.#stopping) return;
    this.parts.field.value = this.#takeBack(turn);
    this.#grow();
    this.parts.field.focus();
  }

  #retry(turn) {
    if (!this.#stopping) this.#ask(this.#takeBack(turn));
  }

  // Streams one answer into a turn; returns its text.
  async #stream(turn) {
    const { log } = this.parts, text = turn.querySelector(".text"), note = turn.querySelector(".note");
    const seen = { text: "", pieces: 0, tokens: 0, began: performance.now(), first: 0, finish: "" };
    const rate = () => {
      const now = performance.now(), count = seen.tokens || seen.pieces, apart = now - seen.first > 100;
      // Pieces that arrive together were computed while the first was waited for.
      const perSecond = (apart ? (count - 1) / (now - seen.first) : count / (now - seen.began)) * 1000;
      return count > 1 ? `${perSecond.toFixed(1)} tokens/s` : "";
    };
    let painting = 0;  // chunks may come faster than frames
    const paint = () => {
      painting = 0;
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      show(text, seen.text);
      note.textContent = rate();
      if (follows) log.scrollTop = log.scrollHeight;
    };
    const { address, headers, body } = this.request(this.messages.map(({ role, content }) => ({ role, content })));
    const options = { stream: true, stream_options: { include_usage: true } };
    const response = await fetch(address, { method: "POST", headers: { "content-type": "application/json", ...headers }, body: JSON.stringify({ ...body, ...options }), signal: this.#stopping.signal });
    if (!response.ok) throw await problem(response);
    try {
      await readEvents(response.body, (chunk) => {
        if (chunk.usage) seen.tokens = chunk.usage.completion_tokens;
        const choice = chunk.choices[0];
        if (!choice || choice.delta?.role) return;
        seen.first ||= performance.now();
        seen.pieces += 1;
        seen.finish = choice.finish_reason ?? seen.finish;
        seen.text += choice.text ?? (choice.delta.reasoning_content ?? "") + (choice.delta.content ?? "");
        painting ||= requestAnimationFrame(paint);
      });
      if (!seen.finish) throw new Error("The connection ended before the answer did.");
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      seen.finish = "stopped";
    } finally {
      cancelAnimationFrame(painting);  // it would write over what is said of the end
      paint();
    }
    const waited = `first after ${((seen.first - seen.began) / 1000).toFixed(2)} s`, ends = { length: "cut at its limit", stopped: "stopped" };
    note.textContent = [seen.tokens ? `${seen.tokens} tokens` : "", rate(), seen.first ? waited : "", ends[seen.finish]].filter(Boolean).join(" \u00b7 ");
    return seen.text;
  }

  async #ask(question) {
    if (!this.isContinued()) this.messages = [];
    const chat = this.messages, { log, field } = this.parts;  // `begin` may come before the answer's end
    const index = chat.push({ role: "user", content: question }) - 1;
    this.#addTurn("user", question, index);
    const turn = this.#addTurn("assistant", "", index);
    turn.classList.add("writing");
    log.scrollTop = log.scrollHeight;
    this.#stopping = new AbortController();
    this.#setBusy(true);
    try {
      turn.said = await this.#stream(turn);
      chat.push({ role: "assistant", content: turn.said, by: turn.by });  // another model may write the next one
    } catch (error) {
      chat.pop();  // the question may be asked again
      const note = turn.querySelector(".note");
      note.textContent = error.name === "AbortError" ? "stopped" : words(error);
      note.classList.toggle("wrong", error.name !== "AbortError");
      if (chat === this.messages && !field.value) field.value = question;
    }
    if (chat === this.messages) this.keep(chat);
    turn.classList.remove("writing");
    this.#stopping = null;
    this.#setBusy(false);
    field.focus();
  }

  #setBusy(isBusy) {
    const { send, log } = this.parts;
    send.textContent = isBusy ? "Stop" : "Send";
    send.classList.toggle("stop", isBusy);
    log.setAttribute("aria-busy", isBusy);
    for (const button of log.querySelectorAll(".actions button")) button.disabled = isBusy;
  }

  #grow() {
    this.parts.field.style.height = "auto";
    this.parts.field.style.height = `${this.parts.field.scrollHeight + 2}px`;
  }
}

async function copy(turn, button) {
  try {
    await navigator.clipboard.writeText(turn.said);
    button.textContent = "Copied";
  } catch {  // a page that is not of this machine and has no TLS may not
    getSelection().selectAllChildren(turn.querySelector(".text"));
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

// Shows the little markup that models write most: fenced code, `code` and **bold**. Everything else is text.
function show(into, text) {
  const parts = text.split(/^```.*\n?/m);  // every second one is code; the last may not have ended yet
  into.replaceChildren(...parts.flatMap((part, i) => (i % 2 ? el("pre", {}, part) : prose(part))));
}

function prose(text) {
  const pieces = text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/);
  return pieces.map((piece, i) => (i % 2 === 0 ? document.createTextNode(piece) : piece[0] === "`" ? el("code", {}, piece.slice(1, -1)) : el("strong", {}, piece.slice(2, -2))));
}

// Calls `onChunk` for each event of a stream; an event may be split over reads, so lines are gathered first.
async function readEvents(body, onChunk) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      onChunk(chunk);
    }
  }
}
