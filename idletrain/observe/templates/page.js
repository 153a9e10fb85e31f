"use strict";
// Fetch the page's content twice a second and change in place only what is new, so that a pressed mouse button, a
// selection and the keyboard focus stay where they are.
const EVERY_MS = 500;
const now = document.getElementById("now"), fault = document.getElementById("fault");

function change(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) { old.replaceWith(fresh.cloneNode(true)); return; }
  if (old.nodeType !== Node.ELEMENT_NODE) { if (old.data !== fresh.data) old.data = fresh.data; return; }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  children(old, fresh);
}

function children(old, fresh) {
  while (old.childNodes.length > fresh.childNodes.length) old.lastChild.remove();
  fresh.childNodes.forEach((node, n) => n < old.childNodes.length ? change(old.childNodes[n], node) : old.append(node.cloneNode(true)));
}

function showFault(text) { fault.textContent = text; fault.hidden = !text; }

async function refresh() {
  try {
    const answer = await fetch("idletrain/now", { cache: "no-cache" });
    if (!answer.ok) throw new Error(answer.statusText);
    const fresh = document.createElement("template");
    fresh.innerHTML = await answer.text();
    children(now, fresh.content);
    showFault("");
  } catch (error) {
    showFault("The scheduler does not answer: the run has ended, or the connection is gone. `idletrain report` shows how it went.");
  }
  setTimeout(refresh, EVERY_MS);
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-ask]");
  if (!button) return;
  const { ask, address } = button.dataset;
  if (ask === "kill" && !confirm("Kill this worker? Its steps since the last progress checkpoint are lost.")) return;
  button.disabled = true;
  const answer = await fetch("idletrain/" + ask, {
    method: "POST", headers: { "Content-Type": "application/json", "X-Idletrain": ask }, body: JSON.stringify({ worker: address }),
  });
  if (!answer.ok) alert(await answer.text());
});

setTimeout(refresh, EVERY_MS);
