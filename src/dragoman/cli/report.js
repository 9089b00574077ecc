"use strict";
// The table is the data: every token links to its row, so the page also works without this script.
(() => {
  const root = document.documentElement;
  document.body.classList.remove("no-script");
  const reader = document.querySelector(".reader");
  const rows = new Map([...document.querySelectorAll("tbody tr")].map((row) => [row.id, row]));
  const tokens = [...document.querySelectorAll("a.t")];
  const tokenOf = new Map(tokens.map((token) => [token.hash.slice(1), token]));
  const meanings = JSON.parse(document.getElementById("meanings").textContent);
  let shown = null;
  let pinned = false;

  const make = (tag, name, text) => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  const figure = (list, name, cell) => {
    if (!cell || !cell.textContent) return;
    list.append(make("dt", "", name), make("dd", "", cell.textContent));
  };

  const show = (id) => {
    if (shown === id || !reader) return;
    mark(shown, false);
    shown = id;
    mark(id, true);
    const row = rows.get(id);
    const cell = (name) => row.querySelector(`[data-key="${name}"]`);
    const what = make("div", "what");
    if (cell("token")) what.append(cell("token").firstElementChild.cloneNode(true));
    what.append(make("span", "", `${cell("position").dataset.label} ${cell("position").textContent}`));
    const figures = make("dl", "figures");
    figure(figures, "FVE", cell("fve"));
    figure(figures, "cosine", cell("cosine"));
    figure(figures, "norm", cell("norm"));
    const parts = [what, make("p", "words", cell("explanation").textContent), figures];
    const flags = cell("flags").textContent.split(", ").filter(Boolean);
    if (flags.length) {
      const list = make("ul", "flags");
      for (const flag of flags) {
        const item = make("li");
        item.append(make("b", "", flag), meanings[flag] ? ` – ${meanings[flag]}` : "");
        list.append(item);
      }
      parts.push(list);
    }
    reader.classList.remove("empty");
    reader.querySelector(".content").replaceChildren(...parts);
  };

  const mark = (id, on) => {
    if (!id) return;
    for (const element of [tokenOf.get(id), rows.get(id)]) element?.classList.toggle("on", on);
    const token = tokenOf.get(id);
    if (token && on) {
      for (const other of tokens) other.tabIndex = -1;
      token.tabIndex = 0;
    }
  };

  const clear = () => {
    mark(shown, false);
    shown = null;
    pinned = false;
    reader.classList.add("empty");
    reader.querySelector(".content").replaceChildren(make("p", "hint", reader.dataset.hint));
  };

  tokens.forEach((token, index) => {
    const id = token.hash.slice(1);
    token.setAttribute("role", "button");
    // One stop for the Tab key; arrows walk from token to token.
    token.tabIndex = index === 0 ? 0 : -1;
    token.addEventListener("pointerenter", (event) => {
      if (event.pointerType === "mouse" && !pinned) show(id);
    });
    token.addEventListener("focus", () => show(id));
    token.addEventListener("click", (event) => {
      event.preventDefault();
      pinned = !(pinned && shown === id);
      show(id);
    });
    token.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      let to = step === undefined ? undefined : index + step;
      if (event.key === "Home") to = 0;
      if (event.key === "End") to = tokens.length - 1;
      if (event.key === " ") token.click();
      if (to === undefined && event.key !== " ") return;
      event.preventDefault();
      tokens[to]?.focus();
    });
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && reader) clear();
  });
  reader?.querySelector(".close").addEventListener("click", clear);
  document.querySelector("tbody").addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    const token = row && tokenOf.get(row.id);
    if (!token || String(getSelection())) return;
    token.focus();
    token.scrollIntoView({ block: "center" });
  });

  const body = document.querySelector("tbody");
  document.querySelectorAll("th button").forEach((button) => {
    const head = button.parentElement;
    button.addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") === "ascending";
      document.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const column = head.cellIndex;
      const numeric = head.classList.contains("num");
      const value = (row) => {
        const cell = row.cells[column];
        if (!numeric) return cell.textContent;
        return cell.dataset.value === "" ? NaN : Number(cell.dataset.value);
      };
      const keyed = [...rows.values()].map((row, order) => ({ row, order, key: value(row) }));
      keyed.sort((a, b) => {
        // Rows without a score stay at the end in both directions.
        if (numeric && (Number.isNaN(a.key) || Number.isNaN(b.key)))
          return Number.isNaN(a.key) - Number.isNaN(b.key) || a.order - b.order;
        const order = numeric ? a.key - b.key : a.key.localeCompare(b.key);
        return (falling ? -order : order) || a.order - b.order;
      });
      body.append(...keyed.map((entry) => entry.row));
    });
  });

  document.querySelector(".filter input")?.addEventListener("input", (event) => {
    const wanted = event.target.value.toLocaleLowerCase();
    for (const [id, row] of rows) {
      const fits = !wanted || row.textContent.toLocaleLowerCase().includes(wanted);
      row.hidden = !fits;
      tokenOf.get(id)?.classList.toggle("dim", !fits);
    }
  });

  // A link to a row (page.html#r12) opens its reading.
  if (tokenOf.has(location.hash.slice(1))) {
    pinned = true;
    show(location.hash.slice(1));
    tokenOf.get(shown).scrollIntoView({ block: "center" });
  }

  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
