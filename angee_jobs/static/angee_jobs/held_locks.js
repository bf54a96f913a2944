/* Comfort only: without it, the page reloads itself as a whole.
   Reloads the list in place, keeping what is selected, focused and scrolled to, and adds "select all". */
"use strict";
{
  const list = () => document.getElementById("held-locks-list");
  const boxes = () => [...list().querySelectorAll("input.action-select")];

  const addSelectAll = () => {
    const head = list().querySelector("th.action-checkbox-column");
    if (!head || !boxes().length) return;
    const all = document.createElement("input");
    all.type = "checkbox";
    all.id = "held-locks-all";
    all.setAttribute("aria-label", head.textContent.trim());
    all.addEventListener("change", () => boxes().forEach((box) => { box.checked = all.checked; }));
    head.append(all);
  };

  /* How to find again in the new list what has the focus in the old one. */
  const place = (element) => {
    if (!element || !list().contains(element)) return null;
    if (element.id) return (root) => root.querySelector(`#${CSS.escape(element.id)}`);
    if (element.matches("input.action-select")) return (root) => [...root.querySelectorAll("input.action-select")].find((box) => box.value === element.value);
    if (element.matches("a[href]")) return (root) => [...root.querySelectorAll("a[href]")].find((link) => link.getAttribute("href") === element.getAttribute("href"));
    if (element.matches("button")) return (root) => root.querySelector("button");
    return element.matches(".results") ? (root) => root.querySelector(".results") : null;
  };

  let busy = false;
  const reload = async () => {
    if (busy) return;
    busy = true;
    try {
      const response = await fetch(location.href, { credentials: "same-origin", cache: "no-store" });
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("held-locks-list");
      if (!fresh) return location.assign(location.href); /* logged out, or an error: show it */
      const selected = new Set(boxes().filter((box) => box.checked).map((box) => box.value));
      const opened = new Set([...list().querySelectorAll("details[open] bdi")].map((whole) => whole.textContent));
      const find = place(document.activeElement);
      const aside = list().querySelector(".results")?.scrollLeft ?? 0;
      list().replaceWith(document.importNode(fresh, true));
      addSelectAll();
      boxes().forEach((box) => { box.checked = selected.has(box.value); });
      list().querySelectorAll("details bdi").forEach((whole) => { whole.closest("details").open = opened.has(whole.textContent); });
      const results = list().querySelector(".results");
      if (results) results.scrollLeft = aside;
      if (find) find(list())?.focus({ preventScroll: true });
      watchLink();
    } catch {
      /* The web server does not answer: the time on the page says how old the list is. Next time, maybe. */
    } finally {
      busy = false;
    }
  };

  const watchLink = () => {
    document.getElementById("held-locks-reload")?.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      reload();
    });
  };

  addSelectAll();
  watchLink();
  const seconds = Number(list().dataset.refresh);
  if (seconds) setInterval(() => { if (!document.hidden) reload(); }, seconds * 1000);
}
