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

  // -- one chart of each panel ------------------------------------------------------------------------------------------

  for (const select of every("select[data-panel]")) {
    const figures = every(`#panel-${select.dataset.panel} figure`);
    const show = () => figures.forEach((figure, i) => { figure.hidden = i !== Number(select.value); });
    every("figcaption", select.closest(".panel")).forEach((caption) => { caption.hidden = true; });
    select.parentElement.hidden = false;
    select.addEventListener("change", show);
    show();
  }

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

  // -- settings of engines ------------------------------------------------------------------------------------------------

  const settings = data("settings");
  const [pair, engine, copy] = ["pair", "engine", "copy"].map((name) => one(`#settings-${name}`));
  function showSettings() {
    const { text, remarks } = settings[pair.value].engines[engine.value];
    one("#settings-text").textContent = text;
    one("#settings-text").hidden = copy.hidden = !text;
    one("#settings-status").textContent = "";
    one("#settings-remarks").replaceChildren(...remarks.map((remark) => element("li", remark)));
  }
  async function copySettings() {
    const place = one("#settings-text");
    try {
      await navigator.clipboard.writeText(place.textContent);
    } catch { // an old browser, or one that keeps files from the clipboard
      getSelection().selectAllChildren(place);
      if (!document.execCommand("copy")) return "select the text and copy it";
    }
    return "copied";
  }
  if (pair) {
    pair.append(...options(settings.map(({ title }) => title)));
    engine.append(...options(settings[0].engines.map(({ name }) => name)));
    for (const select of [pair, engine]) select.addEventListener("change", showSettings);
    copy.addEventListener("click", async () => { one("#settings-status").textContent = await copySettings(); });
    showSettings();
  }
})();
