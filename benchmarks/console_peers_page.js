// What console_peers_page.py puts into a page of TensorBoard or Trackio: it notes when the chart of the loss was
// drawn with new points of the run 0000, as console_page.js does for the console.

window.drawn = [];  // [newest step, Unix ms] of the first drawing after each answer with a newer point
let newest = 0, awaitsDrawing = false, isPressed = false;

const arrived = (step) => {
  if (step <= newest) return;
  newest = step;
  awaitsDrawing = true;
};
const drew = () => {
  if (awaitsDrawing) window.drawn.push([newest, Date.now()]);
  awaitsDrawing = false;
};

// TensorBoard: a request per chart, by XMLHttpRequest; charts are SVG, in shadow roots, of a card that has the tag.
const { open, send } = XMLHttpRequest.prototype, { setAttribute } = Element.prototype;
XMLHttpRequest.prototype.open = function (method, address, ...rest) {
  open.call(this, method, address, ...rest);
  if (!String(address).endsWith("/scalars_multirun")) return;
  this.addEventListener("load", () => {  // before the page's own, which are added later
    if (this.tag === "loss") arrived(JSON.parse(this.responseText)["0000"].at(-1)[1]);
  });
  this.addEventListener("loadend", () => this.tag === "loss" && isPressed && requestAnimationFrame(window.press));
};
XMLHttpRequest.prototype.send = function (body) {
  if (body instanceof FormData) this.tag = body.get("tag");
  return send.call(this, body);
};
const tagOf = (element) => {
  while (element && !element.tag) element = element.getRootNode().host;
  return element?.tag;
};
Element.prototype.setAttribute = function (name, value) {
  if (name === "d" && awaitsDrawing && tagOf(this) === "loss") drew();
  return setAttribute.call(this, name, value);
};
window.press = () => {
  isPressed = true;
  document.querySelector("app-header-reload button").click();
};

// Trackio: answers of one or many runs, by fetch; only the run 0000 has so many points. Charts are on a canvas.
const { json } = Response.prototype, { stroke } = CanvasRenderingContext2D.prototype;
Response.prototype.json = async function () {
  const found = await json.call(this);
  if (this.url.endsWith("/get_logs_batch")) {
    arrived(Math.max(0, ...found.data.map((run) => run.logs.at(-1)?.step ?? 0)));
  }
  return found;
};
CanvasRenderingContext2D.prototype.stroke = function (...words) {
  if (this.canvas.closest?.('[data-metric="loss"]')) drew();
  return stroke.apply(this, words);
};
