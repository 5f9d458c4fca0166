"use strict";
/* Immediate tips, also by keyboard, and the costs.  The page is readable without them. */
(() => {
  const tip = document.getElementById("tip");
  let shown = null;

  // a title that stays would show twice
  for (const node of document.querySelectorAll("[title]")) {
    node.dataset.tip = node.title;
    node.removeAttribute("title");
  }
  for (const node of document.querySelectorAll("svg title")) {
    const shape = node.parentElement;
    shape.dataset.tip = node.textContent;
    shape.setAttribute("aria-label", node.textContent);
    node.remove();
  }

  function hide() {
    if (shown) shown.classList.remove("at");
    shown = null;
    tip.hidden = true;
  }

  function show(node) {
    if (node === shown) return;
    hide();
    shown = node;
    node.classList.add("at");
    tip.textContent = node.dataset.tip;
    tip.hidden = false;
    moveTip();
  }

  function moveTip() {
    const box = shown.getBoundingClientRect(), own = tip.getBoundingClientRect(), edge = 8;
    const width = document.documentElement.clientWidth;
    const left = Math.min(Math.max(box.left + box.width / 2 - own.width / 2, edge), Math.max(width - own.width - edge, edge));
    const above = box.top - own.height - edge;
    tip.style.setProperty("left", `${left}px`);
    tip.style.setProperty("top", `${above > edge ? above : box.bottom + edge}px`);
  }

  document.addEventListener("pointerover", (event) => {
    const node = event.target.closest && event.target.closest("[data-tip]");
    if (node) show(node); else hide();
  });
  document.addEventListener("pointerdown", (event) => {
    const node = event.target.closest && event.target.closest("[data-tip]");
    if (node) show(node); else hide();
  });
  // a tip follows its shape until that leaves the window
  document.addEventListener("scroll", () => {
    if (!shown) return;
    const box = shown.getBoundingClientRect();
    if (box.bottom < 0 || box.top > document.documentElement.clientHeight) hide(); else moveTip();
  }, true);

  for (const text of document.querySelectorAll(".tokens")) {
    const tokens = [...text.querySelectorAll("[data-tip]")];
    let at = -1;
    text.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") { hide(); return; }
      if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      at = Math.min(Math.max(at + move, 0), tokens.length - 1);
      tokens[at].scrollIntoView({ block: "nearest" });
      show(tokens[at]);
    });
    text.addEventListener("focus", () => { if (at >= 0 && text.matches(":focus-visible")) show(tokens[at]); });
    text.addEventListener("blur", hide);
  }

  // the same sums as in cost.py
  const number = (value, places) =>
    value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
  function money(value) {
    const size = Math.abs(value), places = size >= 1000 ? 0 : size >= 0.1 || size === 0 ? 2 : 4;
    return `${value < 0 ? "−" : ""}$${number(size, places)}`;
  }
  function duration(days) {
    if (days === null) return "not measured";
    if (days === Infinity) return "never";
    if (days > 3650) return "over 10 years";
    if (days === 0) return "at once";
    return days < 2 ? `${number(days * 24, 1)} hours` : `${number(days, 1)} days`;
  }
  function texts(row, price, tokens, other) {
    const plain = Number(row.plain), fast = Number(row.fast);
    const trained = row.trained === undefined ? null : Number(row.trained);
    const before = price / 3600 / plain * 1e6, after = price / 3600 / fast * 1e6, saved = (before - after) * tokens;
    const built = trained === null && !other ? null : (trained || 0) / 3600 * price + other;
    const hours = [plain, fast].map((speed) => number(tokens * 1e6 / speed / 3600, 1));
    return {
      before: money(before), after: money(after), saved: money(saved), hours: hours.join(" → "),
      built: built === null ? "not measured" : money(built),
      price: money(price),
      payback: duration(saved <= 0 ? Infinity : built === null ? null : built / saved),
    };
  }
  function settings() {
    const found = {};
    for (const input of document.querySelectorAll("[data-setting]")) {
      const value = Number(input.value);
      const fine = input.value.trim() !== "" && Number.isFinite(value) && value >= 0;
      input.setAttribute("aria-invalid", String(!fine));
      found[input.dataset.setting] = fine ? value : null;
    }
    return found;
  }
  function recompute() {
    const { price, tokens, other } = settings();
    const whole = price !== null && tokens !== null && other !== null;
    for (const row of document.querySelectorAll("[data-plain]")) {
      const cells = whole ? texts(row.dataset, price, tokens, other) : {};
      for (const cell of row.querySelectorAll("[data-cell]")) {
        const text = cells[cell.dataset.cell] || "–";
        cell.textContent = text;
        cell.classList.toggle("missing", text === "not measured");
      }
    }
  }
  for (const input of document.querySelectorAll("[data-setting]")) input.addEventListener("input", recompute);
})();
