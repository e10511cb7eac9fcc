// The chat page of the server: its model, its settings, its key. The conversation is kept for as long as its tab is open.

import { Chat, problem, words } from "./chat.js";

const at = (id) => document.getElementById(id);

function headers() {
  const key = at("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

const chat = new Chat({ log: at("log"), hello: at("hello"), form: at("composer"), field: at("prompt"), send: at("send") }, {
  name: () => at("model").value,
  request(messages) {
    const system = at("system").value.trim(), most = Number(at("max-tokens").value);
    return { address: "v1/chat/completions", headers: headers(), body: {
      model: at("model").value || undefined,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
      temperature: Number(at("temperature").value),
      max_tokens: most > 0 ? most : undefined,
    } };
  },
  keep(messages) {
    try {
      sessionStorage.setItem("messages", JSON.stringify(messages));
    } catch {  // larger than a browser keeps: then it is not kept
      sessionStorage.removeItem("messages");
    }
  },
});

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

function showSettings(isShown) {
  at("settings").hidden = !isShown;
  at("settings-button").setAttribute("aria-expanded", isShown);
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.stop();
});
at("temperature").addEventListener("input", () => {
  at("temperature-shown").textContent = Number(at("temperature").value).toFixed(1);
});
at("key").addEventListener("change", () => {
  sessionStorage.setItem("key", at("key").value);  // gone with the tab
  loadModels();
});
at("settings-button").addEventListener("click", () => showSettings(at("settings").hidden));
at("new").addEventListener("click", () => chat.begin());

at("key").value = sessionStorage.getItem("key") ?? "";
loadModels().then(() => chat.restore(JSON.parse(sessionStorage.getItem("messages") ?? "[]")));
