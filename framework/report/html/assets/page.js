(() => {
  "use strict";
  const one = (selector) => document.querySelector(selector);
  const every = (selector) => [...document.querySelectorAll(selector)];
  const data = (name) => JSON.parse(one(`#data-${name}`).textContent);
  const element = (tag, text, className, title) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (className) made.className = className;
    if (title) made.title = title;
    return made;
  };

  // -- light and dark: as the system says, until the reader says otherwise ------------------------------------------

  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const dark = () => (chosen === null ? system.matches : chosen);

  function dress(model) {
    const style = getComputedStyle(document.documentElement);
    const [ink, soft, line, ground] = ["--ink", "--soft", "--line", "--card"].map((name) => style.getPropertyValue(name));
    const colours = {
      LinearAxis: { axis_label_text_color: ink, major_label_text_color: soft, axis_line_color: line,
        major_tick_line_color: line, minor_tick_line_color: null, axis_label_text_font_style: "normal" },
      Grid: { grid_line_color: model.grid_line_color === null ? null : line },
      Legend: { label_text_color: ink, label_text_font_size: "12px" },
      Text: { text_color: ink },
    };
    colours.CategoricalAxis = { ...colours.LinearAxis, group_text_color: soft, separator_line_color: line };
    const mine = colours[model.type];
    if (mine) model.setv(mine);
  }

  const shown = new Map();
  function paint() {
    document.documentElement.classList.toggle("dark", dark());
    for (const plot of shown.values()) for (const model of plot.references()) dress(model);
  }
  one("#theme").addEventListener("click", () => { chosen = !dark(); paint(); });
  system.addEventListener("change", paint);

  // -- plots: drawn when they come into sight -------------------------------------------------------------------------

  let plots = null;
  function ready() { // the library stands in the page as text: most readers look at the table first
    if (plots) return;
    const script = element("script", one("#plot-library").textContent);
    document.head.append(script);
    script.remove();
    plots = data("plots");
  }
  async function draw(panel, key) {
    ready();
    const place = one(`#plot-${panel}`);
    place.replaceChildren();
    const views = await Bokeh.embed.embed_item(plots[key], `plot-${panel}`);
    const plot = [...views.roots][0].model;
    for (const model of plot.references()) {
      if (model.type === "Legend") model.setv({ ncols: Math.max(1, Math.floor(place.clientWidth / 230)) });
    }
    shown.set(panel, plot);
    paint();
  }
  const sight = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      sight.unobserve(target);
      draw(target.id.slice("plot-".length), target.dataset.now || target.dataset.first);
    }
  }, { rootMargin: "200px" });
  every(".plot").forEach((place) => sight.observe(place));
  for (const select of every("select[data-plot]")) {
    select.addEventListener("change", () => {
      const place = one(`#plot-${select.dataset.plot}`);
      sight.unobserve(place);
      const title = one(`#title-${select.dataset.plot}`).textContent;
      place.setAttribute("aria-label", `${title}: ${select.selectedOptions[0].dataset.words}`);
      draw(select.dataset.plot, select.value);
    });
  }

  // -- the table --------------------------------------------------------------------------------------------------------

  const table = jQuery("#cells").DataTable({
    paging: false, order: [], autoWidth: false,
    layout: { topStart: "search", topEnd: null, bottomStart: "info", bottomEnd: null },
    language: { search: "search", info: "_TOTAL_ cells", infoEmpty: "no cells", infoFiltered: "of _MAX_",
      zeroRecords: "no cell is like that" },
  });
  const filters = every("select[data-column]");
  jQuery.fn.dataTable.ext.search.push((settings, texts, row) => filters.every((select) =>
    !select.value || settings.aoData[row].nTr.cells[select.dataset.column].textContent === select.value));
  for (const select of filters) {
    select.closest(".filters").hidden = false;
    select.addEventListener("change", () => table.draw());
  }

  // -- single responses -------------------------------------------------------------------------------------------------

  const responses = data("responses");
  const [cell, prompt] = [one("#response-cell"), one("#response-prompt")];
  function show() {
    const response = responses.cells[cell.value].responses[prompt.value];
    const [about, tokens, text] = ["about", "tokens", "text"].map((name) => one(`#response-${name}`));
    tokens.replaceChildren();
    text.textContent = "";
    about.textContent = "There is no response to this prompt.";
    if (!response) return;
    const count = response.tokens.length + response.left;
    about.textContent = `${count} tokens in ${response.rounds} rounds: ${(count / response.rounds).toFixed(2)} a round`
      + (response.fates ? "" : "; its rounds do not add up to its tokens, so what became of each is not known");
    for (let i = 0; i <= response.tokens.length; i++) {
      const lost = response.rejected[i];
      if (lost) tokens.append(element("span", `−${lost}`, "rejected", `${lost} drafted tokens were not kept`));
      if (i === response.tokens.length) break;
      const fate = response.fates[i] || "";
      tokens.append(element("span", response.tokens[i], `token ${fate}`, responses.fates[fate] || ""));
    }
    if (response.left) tokens.append(element("span", `and ${response.left} more`));
    text.textContent = response.text + (response.cut ? " …" : "");
  }
  function offer() {
    const kept = prompt.value;
    const options = responses.cells[cell.value].responses.map((response, i) => {
      const option = element("option", response.name + (response.category ? `, ${response.category}` : ""));
      option.value = i;
      return option;
    });
    prompt.replaceChildren(...options);
    if (kept && kept < options.length) prompt.value = kept;
    show();
  }
  if (cell) {
    responses.cells.forEach(({ title }, i) => {
      const option = element("option", title);
      option.value = i;
      cell.append(option);
    });
    cell.addEventListener("change", offer);
    prompt.addEventListener("change", show);
    offer();
  }

  // -- settings of engines ------------------------------------------------------------------------------------------------

  const settings = data("settings");
  const [pair, engine, copy] = ["pair", "engine", "copy"].map((name) => one(`#settings-${name}`));
  function tell() {
    const { text, remarks } = settings[pair.value].engines[engine.value];
    one("#settings-text").textContent = text;
    one("#settings-text").hidden = copy.hidden = !text;
    one("#settings-said").textContent = "";
    one("#settings-remarks").replaceChildren(...remarks.map((remark) => element("li", remark)));
  }
  async function copied() {
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
    const offers = [[pair, settings.map(({ title }) => title)], [engine, settings[0].engines.map(({ name }) => name)]];
    for (const [select, names] of offers) {
      select.append(...names.map((name, i) => {
        const option = element("option", name);
        option.value = i;
        return option;
      }));
      select.addEventListener("change", tell);
    }
    copy.addEventListener("click", async () => { one("#settings-said").textContent = await copied(); });
    tell();
  }

  paint();
})();
