// Drains a node, or ends its drain, after a confirmation.
import { byId, setText } from "./dom";
import { authorization, errorMessage } from "./feed";
import { plural } from "./format";
import type { LiveNode } from "./types";

export function setUpDrain(upNodes: () => LiveNode[]): (node: LiveNode) => void {
  const dialog = byId<HTMLDialogElement>("drain");
  const confirm = byId<HTMLButtonElement>("drain-confirm");
  const error = byId("drain-error");
  let action: { path: string } | null = null;

  byId("drain-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("submit", (event) => event.preventDefault());
  confirm.addEventListener("click", async () => {
    if (!action) return;
    confirm.disabled = true;
    try {
      const response = await fetch(action.path, { method: "POST", headers: authorization() });
      if (response.ok) dialog.close();
      else setText(error, await errorMessage(response));
    } catch {
      setText(error, "The router does not answer.");
    } finally {
      confirm.disabled = false;
    }
  });

  return (node) => {
    const draining = node.state === "draining";
    const word = draining ? "Undrain" : "Drain";
    action = { path: `/admin/nodes/${encodeURIComponent(node.name)}/${draining ? "undrain" : "drain"}` };
    setText(byId("drain-title"), `${word} ${node.name}?`);
    const others = upNodes().filter((other) => other.name !== node.name && other.models.some((model) => node.models.includes(model))).length;
    const left = others ? `${plural(others, "other node")} can serve its models.` : "No other node can serve its models: their requests will fail.";
    setText(
      byId("drain-text"),
      draining ? "It gets requests again." : `It gets no new requests; its ${plural(node.in_flight, "running request")} will finish. ${left}`,
    );
    setText(error, "");
    setText(confirm, word);
    dialog.showModal();
    byId("drain-cancel").focus();
  };
}
