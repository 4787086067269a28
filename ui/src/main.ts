// The live page: connects to the feed and passes each part of its data to the part of the page that shows it.
import "./style.css";
import { Charts } from "./charts";
import { Decisions } from "./decisions";
import { byId, setText } from "./dom";
import { setUpDrain } from "./drain";
import { Feed, setToken, token, type State } from "./feed";
import { Fleet } from "./fleet";
import { Failures } from "./failures";
import {
  showAlerts, showClientErrors, showConfiguration, showEndedAlerts, showOverview, showPrefixes, showPrompts, showQueue, showRouter, showRoutes,
  showScaling, showTenants,
} from "./panels";
import { setUpTheme } from "./theme";
import type { Sections } from "./types";

const live = byId("live");
const signIn = byId("sign-in");
const signOut = byId<HTMLButtonElement>("sign-out");
const connection = byId("connection");

let sections: Sections | null = null;
const charts = new Charts();
const decisions = new Decisions();
const failures = new Failures();
const fleet = new Fleet(setUpDrain(() => sections?.nodes.filter((node) => node.state === "up") ?? []));
setUpTheme(() => charts.recolour());

function show(changed: Partial<Sections>): void {
  if (!sections) return;
  sections = { ...sections, ...changed };
  showRouter(sections);
  showOverview(sections, charts);
  showAlerts(sections.alerts);
  if (changed.nodes || changed.alerts || changed.islands) fleet.show(sections);
  if (changed.failed_requests) failures.show(sections.failed_requests, sections.router.journal);
  if (changed.ended_alerts) showEndedAlerts(sections.ended_alerts);
  if (changed.routes) showRoutes(sections);
  if (changed.tenants || changed.queue) showTenants(sections);
  if (changed.client_errors) showClientErrors(sections.client_errors);
  if (changed.router) showConfiguration(sections.router);
  if (changed.queue) showQueue(sections);
  if (changed.prefixes || changed.nodes) showPrefixes(sections);
  if (changed.prompts) showPrompts(sections);
  if (changed.scaling) showScaling(sections);
}

const feed = new Feed({
  snapshot(data) {
    if (sections && sections.router.version !== data.router.version) location.reload(); // the router was upgraded
    const { history, decisions: recent, ...rest } = data;
    live.hidden = false;
    signIn.hidden = true;
    signOut.hidden = token() === "";
    charts.reset(history);
    decisions.reset(recent, data.router.journal);
    sections = rest;
    show(rest);
  },
  update(data) {
    const { fine, coarse, decisions: recent, ...changed } = data;
    charts.add(fine, coarse);
    if (recent) decisions.add(recent);
    show(changed);
  },
  state(state: State, reason: string) {
    connection.className = `chip ${state === "live" ? "up" : state === "connecting" || state === "paused" ? "" : "down"}`;
    setText(connection, reason && state !== "live" ? `${state}: ${reason}` : state);
    document.body.classList.toggle("stale", state === "reconnecting" || state === "paused");
  },
  needsToken(wrong: boolean) {
    live.hidden = true;
    signIn.hidden = false;
    signOut.hidden = true;
    setText(connection, "signed out");
    connection.className = "chip";
    setText(byId("sign-in-error"), wrong ? "The router rejected this token." : "");
    byId<HTMLInputElement>("token").focus();
  },
});

// On a phone the sections' links are behind a button.
const menu = byId<HTMLButtonElement>("menu");
const bar = menu.closest("header");
function openMenu(open: boolean): void {
  bar?.classList.toggle("open", open);
  menu.setAttribute("aria-expanded", String(open));
}
menu.addEventListener("click", () => openMenu(menu.getAttribute("aria-expanded") !== "true"));
byId("sections").addEventListener("click", () => openMenu(false));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || menu.getAttribute("aria-expanded") !== "true") return;
  openMenu(false);
  menu.focus();
});

signIn.addEventListener("submit", (event) => {
  event.preventDefault();
  const input = byId<HTMLInputElement>("token");
  setToken(input.value.trim());
  input.value = "";
  void feed.run();
});
signOut.addEventListener("click", () => {
  feed.stop();
  setToken("");
  location.reload();
});

void feed.run();
