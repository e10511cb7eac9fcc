// The console: its views read the server's routes, and its first view is the table of runs.

import * as api from "./api.js";
import { start } from "../charts/router.js";
import { ChatView } from "./chat.js";
import { MixtureView } from "./mixture.js";
import * as runs from "./table.js";

start(api, { title: "Runs", open: runs.open }, { mixture: ["Mixture and control", MixtureView], chat: ["Chat", ChatView] });
