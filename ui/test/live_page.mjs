// Drives the live page in a real browser: signs in, reads it, opens a decision, drains a node, checks accessibility.
//
//   node live_page.mjs URL TOKEN CHROMIUM SCREENSHOTS
//
// Prints one JSON object with what it found. tests/browser/test_live_page.py judges it.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const [url, token, executablePath, folder] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const found = { errors: [], requests: [], axe: {}, bytes: 0 };
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-dev-shm-usage"] });

async function open(options) {
  const context = await browser.newContext(options);
  const page = await context.newPage();
  page.on("pageerror", (error) => found.errors.push(error.message));
  page.on("console", (message) => {
    const text = message.text();
    if (message.type() === "error" && !text.includes("401")) found.errors.push(text);
  });
  page.on("request", (request) => found.requests.push(request.url()));
  await page.goto(url);
  return page;
}

async function signIn(page, value) {
  await page.waitForSelector("#sign-in:not([hidden])");
  await page.fill("#token", value);
  await page.keyboard.press("Enter");
}

/** Run axe-core in the page's world, where the page's own security policy does not apply to it. */
async function checkAccessibility(page, name) {
  const session = await page.context().newCDPSession(page);
  await session.send("Runtime.evaluate", { expression: axe });
  const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
  const run = `axe.run(document, { runOnly: ${JSON.stringify(tags)} }).then((result) => JSON.stringify(result.violations))`;
  const { result } = await session.send("Runtime.evaluate", { expression: run, awaitPromise: true });
  found.axe[name] = JSON.parse(result.value).map((one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => node.html).join(" | ")}`);
}

async function shot(page, name, options = {}) {
  if (folder) await page.screenshot({ path: `${folder}/${name}.png`, ...options });
}

const desktop = { viewport: { width: 1440, height: 900 }, colorScheme: "light", reducedMotion: "reduce" };

// Sign in: a wrong token is refused, the right one is not in the address, and it is gone with the tab.
const page = await open(desktop);
await page.waitForSelector("#sign-in:not([hidden])");
await checkAccessibility(page, "sign-in");
await signIn(page, "wrong");
await page.waitForFunction(() => document.querySelector("#sign-in-error").textContent !== "");
found.wrong_token = await page.textContent("#sign-in-error");
await signIn(page, token);
await page.waitForSelector("#live:not([hidden]) .tile");
found.address = page.url();
found.stored = await page.evaluate(() => JSON.stringify({ ...localStorage }) + document.cookie);

// What it shows.
await page.waitForFunction(() => document.querySelectorAll("#decision-list details").length > 3);
await page.waitForTimeout(2500);
found.verdict = await page.textContent("#verdict");
found.facts = await page.textContent("#router-facts");
found.tiles = await page.locator(".tile").allTextContents();
found.alerts = await page.locator(".alert h2").allTextContents();
found.in_trouble = await page.locator(".nodes .in-trouble th").allTextContents();
found.nodes = await page.locator(".nodes tbody th").allTextContents();
found.islands = await page.locator("h3.island span:first-child").allTextContents();
found.routes = await page.locator("#route-table tbody tr").allTextContents();
found.queue = await page.textContent("#queue-table");
found.prefixes = await page.locator("#prefix-table tbody tr").count();
await page.waitForSelector(".finding");
found.findings = await page.locator(".finding").allTextContents();
found.advice = await page.textContent("#advice");
found.cut = await page.evaluate(() => [...document.querySelectorAll(".scroll, .nodes td, .nodes th")].filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent));
found.charts = await page.locator(".plot canvas").count();
found.connection = await page.textContent("#connection");
const cells = (selector) => page.locator(selector).evaluateAll((rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent).join("|")));
found.tenants = await cells("#tenant-table tbody tr");
found.client_errors = await cells("#client-errors tbody tr");
found.configuration = await page.textContent("#configuration-body");
await shot(page, "live-page-light");

// Failed requests: the latest, why the nodes of one failed, and the search.
const failures = page.locator("#failed-list summary");
found.failures = await failures.allTextContents();
await failures.nth(found.failures.findIndex((text) => text.includes("502"))).click();
await page.waitForSelector("#failed-list details[open] tbody tr");
found.tries = await cells("#failed-list details[open] tbody tr");
found.searched_id = await page.locator("#failed-list details[open] summary code").textContent();
await page.locator("#failures").scrollIntoViewIfNeeded();
await shot(page, "live-page-failures", { clip: await page.locator("#failures").boundingBox().then((box) => ({ ...box, height: Math.min(box.height, 420) })) });
async function search(fields) {
  for (const name of ["request_id", "tenant", "status"]) await page.fill(`#search input[name=${name}]`, fields[name] ?? "");
  await page.locator("#search input[name=failed]").setChecked(fields.failed ?? true);
  await page.click("#search button[type=submit]");
  await page.waitForFunction(() => document.querySelector("#failures-note").textContent.includes(" found."));
}
await search({ request_id: found.searched_id });
found.found_by_id = await page.locator("#failed-list summary code").allTextContents();
await search({ status: "502" });
found.found_by_status = await failures.allTextContents();
await search({ tenant: "chat", status: "200", failed: false });
found.found_ok = await failures.allTextContents();
await search({ tenant: "nobody" });
found.found_nothing = await page.textContent("#failures-note");
await page.click("#search-clear");
found.after_clear = await failures.count();

// It updates by itself.
const before = await page.textContent("#tiles");
await page.waitForFunction((text) => document.querySelector("#tiles").textContent !== text, before);

// A decision opens with the keyboard, and stays where it is while others arrive.
const summaries = page.locator("#decision-list summary");
const texts = await summaries.allTextContents();
const summary = summaries.nth(Math.max(0, texts.findIndex((text) => text.includes("eu-")))); // one with several candidates
await summary.focus();
await page.keyboard.press("Enter");
await page.waitForSelector("#decision-list details[open] .prices li");
const first = await summary.textContent();
found.prices = await page.locator("#decision-list details[open] .prices li").allTextContents();
found.price_labels = await page.locator("#decision-list details[open] .stack").first().getAttribute("aria-label");
await page.waitForSelector("#new-decisions:not([hidden])");
found.stays = (await summary.textContent()) === first;
await page.locator("#decisions").scrollIntoViewIfNeeded();
await shot(page, "live-page-decision", { clip: await page.locator("#decisions").boundingBox().then((box) => ({ ...box, height: Math.min(box.height, 520) })), fullPage: false }).catch((error) => found.errors.push(error.message));
await checkAccessibility(page, "light");

// The charts' range, the filter, the order.
await page.locator("#range input[value=coarse]").focus();
await page.keyboard.press("Space");
await page.fill("#node-filter", "us-");
found.filtered = await page.locator(".nodes tbody tr:visible th").allTextContents();
await page.fill("#node-filter", "");
found.first_node = await page.locator("#islands > div:nth-child(2) tbody th").first().textContent();
await page.selectOption("#node-sort", "load");

// A drain asks first. Escape and Cancel change nothing.
await page.getByRole("button", { name: "Drain eu-1" }).click();
found.drain_question = await page.textContent("#drain");
await checkAccessibility(page, "dialog");
await page.keyboard.press("Escape");
found.state_after_escape = await page.locator("tr", { hasText: "eu-1" }).locator(".chip").textContent();
await page.getByRole("button", { name: "Drain eu-1" }).click();
await page.locator("#drain-confirm").click();
await page.waitForSelector("tr:has-text('eu-1') .chip.draining");
await page.getByRole("button", { name: "Undrain eu-1" }).click();
await page.locator("#drain-confirm").click();
await page.waitForSelector("tr:has-text('eu-1') .chip.up");

// Charts of a feed with half a minute missing, and of one with three measurements.
const text = await page.evaluate(async (key) => {
  const reader = (await fetch("/admin/live", { headers: { Authorization: `Bearer ${key}` } })).body.getReader();
  let read = "";
  while (!read.includes("\n\n")) read += new TextDecoder().decode((await reader.read()).value, { stream: true });
  await reader.cancel();
  return read.slice(0, read.indexOf("\n\n"));
}, token);
const feed = JSON.parse(text.slice(text.indexOf("data: ") + 6));
const end_s = Math.floor(Date.now() / 60_000) * 60 - 10; // a label stands at the end of the axis
async function drawn(measured) {
  const fine = [...Array(120).keys()].filter(measured).map((index) => {
    const value = measured(index) === "empty" ? null : 0.5;
    return feed.history.fields.map((field) => (field === "at_s" ? end_s - 119 + index : field === "hit_ratio" ? value : field.includes("_p") ? 987_654 : null));
  });
  const body = `event: snapshot\ndata: ${JSON.stringify({ ...feed, history: { ...feed.history, fine } })}\n\n`;
  const other = await (await browser.newContext(desktop)).newPage();
  await other.route("**/admin/live", (route) => route.fulfill({ body, contentType: "text/event-stream" }));
  await other.goto(url);
  await other.waitForSelector(".plot canvas");
  const result = await other.evaluate(() => {
    const colour = (name) => {
      const probe = document.body.appendChild(document.createElement("span"));
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color.match(/\d+/g).map(Number);
    };
    const line = colour("c0");
    const charts = [...document.querySelectorAll(".plot canvas")];
    const { width, height } = charts[0];
    const { data } = charts[0].getContext("2d").getImageData(0, 0, width, height);
    const drawnAt = (x, y) => data[4 * (y * width + x) + 3] > 150 && line.every((part, at) => Math.abs(part - data[4 * (y * width + x) + at]) < 40);
    const columns = [...Array(width).keys()].filter((x) => [...Array(height).keys()].some((y) => drawnAt(x, y)));
    const holes = columns.slice(1).map((x, at) => x - columns[at]);
    // Labels are cut where they touch the edge of the canvas.
    const cut = charts.flatMap((chart) => {
      const pixels = chart.getContext("2d").getImageData(0, 0, chart.width, chart.height).data;
      const inked = (x, y) => pixels[4 * (y * chart.width + x) + 3] > 60;
      const rows = [...Array(chart.height).keys()];
      const title = chart.closest("figure").querySelector("h3").textContent;
      const top = [...Array(chart.width).keys()].some((x) => inked(x, 0));
      return [rows.some((y) => inked(0, y)) && `${title}: left`, rows.some((y) => inked(chart.width - 1, y)) && `${title}: right`, top && `${title}: top`].filter(Boolean);
    });
    return { share: Math.max(...holes) / (columns.at(-1) - columns[0]), parts: 1 + holes.filter((hole) => hole > 3).length, cut };
  });
  await other.context().close();
  return result;
}
const half = await drawn((index) => index < 30 || index >= 60);
[found.gap_share, found.cut_labels] = [half.share, half.cut];
found.dots = (await drawn((index) => (index % 40 === 20 ? "value" : "empty"))).parts;

// Signing out forgets the token.
await page.getByRole("button", { name: "Sign out" }).click();
await page.waitForSelector("#sign-in:not([hidden])");
found.token_after_sign_out = await page.evaluate(() => sessionStorage.length);
await page.context().close();

// Dark, and the theme button.
const dark = await open({ ...desktop, colorScheme: "dark" });
await signIn(dark, token);
await dark.waitForFunction(() => document.querySelectorAll("#decision-list details").length > 3);
await dark.waitForTimeout(1500);
await checkAccessibility(dark, "dark");
await shot(dark, "live-page-dark");
found.dark = await dark.evaluate(() => getComputedStyle(document.body).backgroundColor);
await dark.getByRole("button", { name: "Theme: auto" }).click();
found.toggled = await dark.evaluate(() => getComputedStyle(document.body).backgroundColor);
await dark.context().close();

// Phone width: nothing is wider than the screen, and no table scrolls sideways.
const phone = await open({ viewport: { width: 390, height: 844 }, colorScheme: "light", isMobile: true, hasTouch: true });
await signIn(phone, token);
await phone.waitForSelector("#live:not([hidden]) .tile");
await phone.waitForTimeout(1500);
found.phone_width = await phone.evaluate(() => document.documentElement.scrollWidth);
found.phone_cut = await phone.evaluate(() => [...document.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.getAttribute("aria-label")));
await checkAccessibility(phone, "phone");
const menu = async () => [await phone.locator("#sections").isVisible(), await phone.locator("#menu").getAttribute("aria-expanded")];
found.phone_menu_closed = await menu();
await phone.evaluate(() => window.scrollTo(0, 2500));
found.phone_menu_stays = await phone.locator("#menu").evaluate((one) => one.getBoundingClientRect().top >= 0);
await phone.tap("#menu");
found.phone_menu_open = await menu();
await checkAccessibility(phone, "phone-menu");
await phone.tap("#sections a[href='#failures']");
await phone.waitForTimeout(800);
found.phone_menu_after = await menu();
found.phone_section_top = await phone.locator("#failures").evaluate((one) => one.getBoundingClientRect().top);
await phone.evaluate(() => window.scrollTo(0, 0));
await shot(phone, "live-page-phone");
await phone.context().close();

await browser.close();
console.log(JSON.stringify(found));
