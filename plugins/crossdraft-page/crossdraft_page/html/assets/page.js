(() => {
  "use strict";
  const one = (selector) => document.querySelector(selector);
  const every = (selector, from = document) => [...from.querySelectorAll(selector)];
  const data = (name) => JSON.parse(one(`#data-${name}`).textContent);
  const element = (tag, text, className, title) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (className) made.className = className;
    if (title) made.title = title;
    return made;
  };
  const options = (names) => names.map((name, i) => {
    const option = element("option", name);
    option.value = i;
    return option;
  });

  // -- light and dark: the system's choice until the reader makes one ---------------------------------------------------

  const root = document.documentElement;
  one("#theme").addEventListener("click", () => {
    const scheme = root.style.colorScheme;
    const dark = scheme ? scheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.style.colorScheme = dark ? "light" : "dark";
  });

  // -- the table: filters, and a sort within each group -----------------------------------------------------------------

  const filters = every("select[data-filter]");
  const bodies = every("#cells tbody");
  function filter() {
    for (const body of bodies) {
      const rows = every("tr:not(.group)", body);
      for (const row of rows) {
        const values = { ...row.dataset, ...body.dataset };
        row.hidden = filters.some((select) => select.value && values[select.dataset.filter] !== select.value);
      }
      body.hidden = rows.length > 0 && rows.every((row) => row.hidden);
    }
  }
  for (const select of filters) {
    select.closest(".filters").hidden = false;
    select.addEventListener("change", filter);
  }
  const headers = every("#cells thead th");
  function sort(column) {
    const header = headers[column];
    const descending = header.ariaSort ? header.ariaSort === "ascending" : column > 0; // the greatest number first
    headers.forEach((other) => other.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const order = (row) => row.cells[column].dataset.order;
    const compare = (a, b) => (column ? order(a) - order(b) : order(a).localeCompare(order(b)));
    for (const body of bodies) {
      const rows = every("tr:not(.group)", body).sort((a, b) => (descending ? compare(b, a) : compare(a, b)));
      body.append(...rows);
    }
  }
  headers.forEach((header, i) => {
    header.tabIndex = 0;
    header.addEventListener("click", () => sort(i));
    header.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(i); });
  });

  // -- single responses -------------------------------------------------------------------------------------------------

  const responses = data("responses");
  const [cell, prompt] = [one("#response-cell"), one("#response-prompt")];
  function showResponse() {
    const response = responses.cells[cell.value].responses[prompt.value];
    const [about, tokens, text] = ["about", "tokens", "text"].map((name) => one(`#response-${name}`));
    tokens.replaceChildren();
    about.textContent = response ? "" : "This pair has no response to this prompt.";
    text.hidden = !response || response.texts;
    if (!response) return;
    const count = response.tokens.length + response.left;
    about.textContent = `${count} tokens in ${response.steps} steps: ${(count / response.steps).toFixed(2)} a step`
      + (response.origins ? "" : "; its steps do not add up to its tokens, so the origin of each is not known");
    for (let i = 0; i <= response.tokens.length; i++) {
      const lost = response.rejected[i];
      if (lost) tokens.append(element("del", lost, "rejected", `${lost} draft tokens were rejected here`));
      if (i === response.tokens.length) break;
      const origin = response.origins[i] || "";
      const id = response.texts ? "" : " id";
      tokens.append(element("span", response.tokens[i], `token ${origin}${id}`, responses.origins[origin] || ""));
    }
    if (response.left) tokens.append(element("span", ` … and ${response.left} more tokens`));
    text.textContent = response.text;
  }
  function showCell() {
    const kept = prompt.value;
    const names = responses.cells[cell.value].responses.map(({ name, category }) => name + (category ? `, ${category}` : ""));
    prompt.replaceChildren(...options(names));
    if (kept && kept < names.length) prompt.value = kept;
    showResponse();
  }
  if (cell) {
    cell.append(...options(responses.cells.map(({ title }) => title)));
    cell.addEventListener("change", showCell);
    prompt.addEventListener("change", showResponse);
    showCell();
  }

  // -- added sections: one part under an h3 at a time, and a button that copies each block -------------------------------

  for (const section of every("section.added")) {
    const parts = every("h3", section).map((heading) => {
      const part = element("div", "");
      for (let next; (next = heading.nextElementSibling) && next.tagName !== "H3";) part.append(next);
      heading.replaceWith(part);
      return { title: heading.textContent, part };
    });
    if (parts.length) {
      const select = element("select", "");
      select.setAttribute("aria-label", "shown");
      select.append(...options(parts.map(({ title }) => title)));
      const show = () => parts.forEach(({ part }, i) => { part.hidden = i !== Number(select.value); });
      select.addEventListener("change", show);
      parts[0].part.before(select);
      show();
    }
    for (const block of every("pre", section)) {
      const button = element("button", "copy");
      button.type = "button";
      button.addEventListener("click", async () => { button.textContent = await copied(block); });
      block.before(button);
    }
  }
  async function copied(block) {
    try {
      await navigator.clipboard.writeText(block.textContent);
    } catch { // an old browser, or one that keeps files from the clipboard
      getSelection().selectAllChildren(block);
      if (!document.execCommand("copy")) return "select the text and copy it";
    }
    return "copied";
  }
})();
