// Elements, made without markup: whatever comes from a file is text.

/** Return an element. Properties: class, dataset, on (event -> function), attributes by name; children: nodes or text. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return a table; the first cell of each row is its heading. A cell is text or a node. */
export function table(caption, head, rows, { className = "" } = {}) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", { class: className },
      el("thead", {}, el("tr", {}, head.map((title) => (title ? el("th", { scope: "col" }, title) : el("td"))))),
      el("tbody", {}, rows.map(([first, ...others]) => el("tr", {}, el("th", { scope: "row" }, first), others.map((cell) => el("td", {}, cell)))))));
}

/** Return buttons of which one is pressed: [[value, text]]. */
export function segments(label, choices, chosen, act) {
  const group = el("div", { class: "segments", role: "group", "aria-label": label });
  for (const [value, text, isOff] of choices)
    group.append(el("button", {
      type: "button", "aria-pressed": String(value === chosen), disabled: Boolean(isOff),
      on: { click: (event) => {
        for (const other of group.children) other.setAttribute("aria-pressed", String(other === event.currentTarget));
        act(value);
      } },
    }, text));
  return group;
}

/** Return a button that shows what it holds; Escape and a press elsewhere close it. opened(): called before it is shown. */
export function menu(title, choices, opened = () => {}) {
  const found = el("details", { class: "menu" }, el("summary", { class: "button" }, title), choices);
  const close = (event) => {
    if (!found.contains(event.target)) found.open = false;
  };
  found.addEventListener("toggle", () => {
    document[found.open ? "addEventListener" : "removeEventListener"]("pointerdown", close);
    if (found.open) opened();
  });
  found.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !found.open) return;
    found.open = false;
    found.querySelector("summary").focus();
  });
  return found;
}

/** Call a function once its caller has been quiet for so long. */
export function quiet(milliseconds, act) {
  let timer = 0;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...words), milliseconds);
  };
}

/** Call a function at most once in so many milliseconds, the last call included. */
export function throttled(milliseconds, act) {
  let timer = 0, last = 0;
  return () => {
    if (timer) return;
    timer = setTimeout(() => {
      timer = 0;
      last = performance.now();
      act();
    }, Math.max(0, milliseconds - (performance.now() - last)));
  };
}

/** Return a word of a command line, quoted where a shell needs it. */
export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** Return a paragraph that says what went wrong. */
export const failure = (error) => el("p", { class: "notice bad", role: "alert" }, error.message || String(error));

/** Return a run's state as a coloured pill. */
export const pill = (state) => el("span", { class: `pill ${state}` }, state);

/** Return a link to a view. */
export const link = (href, text, className = "") => el("a", { href, class: className }, text);
