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
await shot(page, "live-page-light");

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
await shot(phone, "live-page-phone");
await phone.context().close();

await browser.close();
console.log(JSON.stringify(found));
