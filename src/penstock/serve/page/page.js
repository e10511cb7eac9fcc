// The chat page: keeps the conversation for as long as its tab is open, streams answers, stops them, asks again.
// Text only ever becomes text nodes.
"use strict";

const at = (id) => document.getElementById(id);
let messages = []; // of the chat that is shown
let stopping = null; // an AbortController while an answer is written

function headers() {
  const key = at("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function problem(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `The server answered ${response.status}.`);
}

// What a person is told of an error; of a lost connection each browser says something else.
function words(error) {
  return error instanceof TypeError ? "The server cannot be reached, or went away." : error.message;
}

async function loadModels() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw await problem(response);
    const { data } = await response.json();
    at("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
    at("status").textContent = "";
  } catch (error) {
    at("status").textContent = words(error);
    if (!at("key").value) showSettings(true);
  }
}

function showSettings(shown) {
  at("settings").hidden = !shown;
  at("settings-button").setAttribute("aria-expanded", shown);
}

// Adds a turn; `index` is that of the question in `messages`, also for its answer.
function addTurn(role, text, index) {
  at("hello").hidden = true;
  const turn = document.createElement("article");
  turn.className = `turn ${role}`;
  turn.index = index;
  turn.said = text;
  const parts = [["span", "who", role === "user" ? "You" : at("model").value], ["div", "text", ""], ["p", "note", ""]];
  for (const [tag, name, content] of parts) {
    const part = element(tag, content);
    part.className = name;
    turn.append(part);
  }
  role === "user" ? (turn.querySelector(".text").textContent = text) : show(turn.querySelector(".text"), text);
  const actions = element("p", "");
  actions.className = "actions";
  const again = role === "user" ? ["Edit", () => edit(turn)] : ["Retry", () => retry(turn)];
  for (const [name, act] of [again, ["Copy", (button) => copy(turn, button)]]) {
    const button = element("button", name);
    button.type = "button";
    button.className = "plain";
    button.addEventListener("click", () => act(button));
    actions.append(button);
  }
  turn.append(actions);
  at("log").append(turn);
  return turn;
}

// Takes the conversation back to before a turn's question; returns that question.
function takeBack(turn) {
  const turns = [...document.querySelectorAll(".turn")];
  const before = turns.slice(0, turns.indexOf(turn) + 1); // after a failed one, two questions have one index
  const question = before.findLast((one) => one.classList.contains("user"));
  for (const one of turns.slice(turns.indexOf(question))) one.remove();
  messages = messages.slice(0, turn.index);
  keep();
  return question.said;
}

function edit(turn) {
  if (stopping) return;
  at("prompt").value = takeBack(turn);
  grow();
  at("prompt").focus();
}

function retry(turn) {
  if (!stopping) ask(takeBack(turn));
}

async function copy(turn, button) {
  try {
    await navigator.clipboard.writeText(turn.said);
    button.textContent = "Copied";
  } catch { // a page that is not of this machine and has no TLS may not
    getSelection().selectAllChildren(turn.querySelector(".text"));
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}

// Keeps the conversation over a reload; it is gone with the tab.
function keep() {
  try {
    sessionStorage.setItem("messages", JSON.stringify(messages));
  } catch { // larger than a browser keeps: then it is not kept
    sessionStorage.removeItem("messages");
  }
}

function restore() {
  if (messages.length) return; // something was asked before the models were known
  messages = JSON.parse(sessionStorage.getItem("messages") ?? "[]");
  messages.forEach(({ role, content }, i) => addTurn(role, content, role === "user" ? i : i - 1));
  at("log").scrollTop = at("log").scrollHeight;
}

// Shows the little markup that models write most: fenced code, `code` and **bold**. Everything else is text.
function show(into, text) {
  const parts = text.split(/^```.*\n?/m); // every second one is code; the last may not have ended yet
  into.replaceChildren(...parts.flatMap((part, i) => (i % 2 ? element("pre", part) : prose(part))));
}

function prose(text) {
  const pieces = text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/);
  return pieces.map((piece, i) => {
    if (i % 2 === 0) return document.createTextNode(piece);
    return piece[0] === "`" ? element("code", piece.slice(1, -1)) : element("strong", piece.slice(2, -2));
  });
}

function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
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

function requestBody() {
  const system = at("system").value.trim();
  const maxTokens = Number(at("max-tokens").value);
  return JSON.stringify({
    model: at("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: Number(at("temperature").value),
    max_tokens: maxTokens > 0 ? maxTokens : undefined,
    stream: true,
    stream_options: { include_usage: true },
  });
}

// Streams one answer into a turn; returns its text and how it went.
async function stream(turn) {
  const log = at("log"), text = turn.querySelector(".text"), note = turn.querySelector(".note");
  const seen = { text: "", pieces: 0, tokens: 0, began: performance.now(), first: 0, finish: "" };
  const rate = () => {
    const now = performance.now(), count = seen.tokens || seen.pieces, apart = now - seen.first > 100;
    // Pieces that arrive together were computed while the first was waited for.
    const perSecond = (apart ? (count - 1) / (now - seen.first) : count / (now - seen.began)) * 1000;
    return count > 1 ? `${perSecond.toFixed(1)} tokens/s` : "";
  };
  let painting = 0; // chunks may come faster than frames
  const paint = () => {
    painting = 0;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    show(text, seen.text);
    note.textContent = rate();
    if (follows) log.scrollTop = log.scrollHeight;
  };
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), body: requestBody(), signal: stopping.signal,
  });
  if (!response.ok) throw await problem(response);
  try {
    await readEvents(response.body, (chunk) => {
      if (chunk.usage) seen.tokens = chunk.usage.completion_tokens;
      const choice = chunk.choices[0];
      if (!choice || choice.delta.role) return;
      seen.first ||= performance.now();
      seen.pieces += 1;
      seen.finish = choice.finish_reason ?? seen.finish;
      seen.text += (choice.delta.reasoning_content ?? "") + (choice.delta.content ?? "");
      painting ||= requestAnimationFrame(paint);
    });
    if (!seen.finish) throw new Error("The connection ended before the answer did.");
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    seen.finish = "stopped";
  } finally {
    cancelAnimationFrame(painting); // it would write over what is said of the end
    paint();
  }
  const waited = `first after ${((seen.first - seen.began) / 1000).toFixed(2)} s`;
  const ends = { length: "cut at its limit", stopped: "stopped" };
  const count = seen.tokens ? `${seen.tokens} tokens` : "";
  note.textContent = [count, rate(), seen.first ? waited : "", ends[seen.finish]].filter(Boolean).join(" · ");
  return seen.text;
}

async function ask(question) {
  const chat = messages; // "New chat" may come before the answer's end
  const index = messages.push({ role: "user", content: question }) - 1;
  addTurn("user", question, index);
  const turn = addTurn("assistant", "", index);
  turn.classList.add("writing");
  at("log").scrollTop = at("log").scrollHeight;
  stopping = new AbortController();
  setBusy(true);
  try {
    turn.said = await stream(turn);
    chat.push({ role: "assistant", content: turn.said });
  } catch (error) {
    chat.pop(); // the question may be asked again
    const note = turn.querySelector(".note");
    note.textContent = error.name === "AbortError" ? "stopped" : words(error);
    note.classList.toggle("wrong", error.name !== "AbortError");
    if (chat === messages && !at("prompt").value) at("prompt").value = question;
  }
  if (chat === messages) keep();
  turn.classList.remove("writing");
  stopping = null;
  setBusy(false);
  at("prompt").focus();
}

function setBusy(busy) {
  at("send").textContent = busy ? "Stop" : "Send";
  at("send").classList.toggle("stop", busy);
  at("log").setAttribute("aria-busy", busy);
  for (const button of document.querySelectorAll(".actions button")) button.disabled = busy;
}

function grow() {
  at("prompt").style.height = "auto";
  at("prompt").style.height = `${at("prompt").scrollHeight + 2}px`;
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = at("prompt").value.trim();
  if (stopping) stopping.abort();
  else if (question) {
    at("prompt").value = "";
    grow();
    ask(question);
  }
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!stopping) at("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stopping?.abort();
});
at("prompt").addEventListener("input", grow);
at("temperature").addEventListener("input", () => {
  at("temperature-shown").textContent = Number(at("temperature").value).toFixed(1);
});
at("key").addEventListener("change", () => {
  sessionStorage.setItem("key", at("key").value); // gone with the tab
  loadModels();
});
at("settings-button").addEventListener("click", () => showSettings(at("settings").hidden));
at("new").addEventListener("click", () => {
  stopping?.abort();
  messages = [];
  keep();
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  at("hello").hidden = false;
  at("prompt").focus();
});

at("key").value = sessionStorage.getItem("key") ?? "";
loadModels().then(restore); // whose turns are called by the model's name
