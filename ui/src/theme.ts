// Light or dark: the reader's setting, or what the button chose. The choice is stored in this browser.
import { byId } from "./dom";

const KEY = "warmroute-theme";
const CHOICES = ["auto", "light", "dark"] as const;
type Choice = (typeof CHOICES)[number];

export function setUpTheme(changed: () => void): void {
  const button = byId<HTMLButtonElement>("theme");
  let choice = (CHOICES.find((one) => one === localStorage.getItem(KEY)) ?? "auto") as Choice;

  function apply(): void {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    button.textContent = `Theme: ${choice}`;
    changed();
  }

  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length] ?? "auto";
    localStorage.setItem(KEY, choice);
    apply();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  apply();
}

/** The current value of a colour of theme.css, for a canvas. */
export function colour(name: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  probe.hidden = true;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
