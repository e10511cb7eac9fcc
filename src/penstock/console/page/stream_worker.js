// The SharedWorker of all windows of a browser: it holds their stream.

import { join } from "./stream.js";

addEventListener("connect", ({ ports: [port] }) => join(port));
