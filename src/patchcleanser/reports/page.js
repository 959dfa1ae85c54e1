// Makes pictures large, and lists all images to sort and filter. The page can be read without it.
"use strict";
(() => {
  const ROWS = matchMedia("(max-width: 40rem)").matches ? 12 : 50; // of a table at a time
  const collator = new Intl.Collator("en", { numeric: true });

  function make(tag, properties = {}, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  }

  function button(content, onClick, properties = {}) {
    const node = make("button", { type: "button", ...properties }, content);
    node.addEventListener("click", onClick);
    return node;
  }

  const stage = make("div");
  const steps = [button("← Previous", () => show(at - 1)), button("Next →", () => show(at + 1))];
  const tools = make("div", { className: "tools" }, ...steps, button("Close", () => dialog.close()));
  const dialog = make("dialog", { className: "zoom", ariaLabel: "Large picture" }, tools, stage);
  let [figures, at] = [[], 0];

  function show(position) {
    at = (position + figures.length) % figures.length;
    const copy = figures[at].cloneNode(true);
    for (const thumbnail of copy.querySelectorAll("button")) thumbnail.replaceWith(...thumbnail.childNodes);
    stage.replaceChildren(copy);
  }

  function drawing(uri, width, height) {
    const box = make("div", { innerHTML: "<svg class=pixelated><image/></svg>" }).firstChild;
    box.setAttribute("viewBox", `0 0 ${width} ${height}`);
    for (const [name, value] of Object.entries({ href: uri, width, height })) box.firstChild.setAttribute(name, value);
    return box;
  }

  function thumbnail(figure, picture) {
    return button(picture, () => {
      figures = [...figure.parentElement.querySelectorAll(":scope > figure")];
      for (const step of steps) step.hidden = figures.length < 2;
      show(figures.indexOf(figure));
      dialog.showModal();
    }, { className: "thumbnail", ariaLabel: `Enlarge ${figure.dataset.image}` });
  }

  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) show(at + step);
  });
  document.body.append(dialog);
  for (const figure of document.querySelectorAll(".gallery > figure")) figure.prepend(thumbnail(figure, figure.firstElementChild));

  function list(place) {
    const { caption, columns, names, pictures: small } = JSON.parse(place.firstElementChild.textContent);
    const all = [...columns[0].cells.keys()];
    const pictures = new Map([...place.closest("section").querySelectorAll("[data-image]")].map((figure) => [figure.dataset.image, figure]));
    const name = (row) => names?.[row] ?? columns[0].cells[row];
    const others = make("div", { hidden: true }); // the pictures that only rows have
    place.append(others);
    for (const [row, picture] of Object.entries(small)) {
      const id = columns[0].cells[row];
      others.append(make("figure", {}, drawing(...picture), make("figcaption", { textContent: name(row) })));
      others.lastChild.dataset.image = id;
      pictures.set(id, others.lastChild);
    }
    const value = ({ texts, cells }, row) => (texts ? texts[cells[row]] : cells[row]);
    const text = (column, row) => value(column, row)?.toFixed?.(column.digits) ?? value(column, row) ?? "–";
    let [rows, first] = [all, 0];

    // A line of a long id ends after a slash or a colon.
    const breakable = (id) => id.split(/(?<=[/:])/).flatMap((part, i) => (i ? [make("wbr"), part] : [part]));

    function line(row) {
      const cells = columns.map((column, i) => make(i ? "td" : "th", { className: "digits" in column ? "num" : "" }, ...breakable(i ? text(column, row) : name(row))));
      cells[0].title = text(columns[0], row);
      cells.forEach((cell, i) => { cell.dataset.title = columns[i].title; });
      cells[0].scope = "row";
      const figure = pictures.get(value(columns[0], row));
      const picture = figure ? thumbnail(figure, figure.querySelector("svg").cloneNode(true)) : make("span");
      if (pictures.size) cells[0].replaceChildren(make("div", { className: "pictured" }, picture, ...cells[0].childNodes));
      for (const cell of cells.slice(1)) cell.classList.toggle("none", cell.textContent === "–");
      const numbers = cells.slice(1).filter((cell) => !cell.matches(".none")).length;
      return make("tr", { className: numbers % 3 === 1 ? "by-four" : "" }, ...cells);
    }

    function draw(from) {
      first = from;
      const end = Math.min(first + ROWS, rows.length);
      body.replaceChildren(...rows.slice(first, end).map(line));
      words.textContent = rows.length ? `${first + 1} to ${end} of ${rows.length}` : "no image";
      earlier.disabled = first === 0;
      later.disabled = end === rows.length;
    }

    function filter() {
      const wanted = search.value.toLowerCase();
      const searched = columns.filter((column) => !("digits" in column));
      rows = all.filter((row) => choosers.every(([column, select]) => !select.value || column.cells[row] === Number(select.value))
        && searched.some((column) => text(column, row).toLowerCase().includes(wanted)));
      draw(0);
    }

    function sort(column, head) {
      const step = head.ariaSort === "ascending" ? -1 : 1;
      for (const other of heads) other.ariaSort = null;
      head.ariaSort = step > 0 ? "ascending" : "descending";
      all.sort((a, b) => {
        const [x, y] = [value(column, a), value(column, b)];
        if (x === null || y === null) return Number(x === null) - Number(y === null); // last, whatever the direction
        return step * ("digits" in column ? x - y : collator.compare(x, y));
      });
      filter();
    }

    const search = make("input", { type: "search" });
    const choosers = columns.filter(({ choose, texts }) => choose && texts.length > 1).map((column) => {
      const options = column.texts.map((name, code) => make("option", { value: code, textContent: name }));
      return [column, make("select", {}, make("option", { value: "", textContent: "all" }), ...options)];
    });
    const heads = columns.map((column) => {
      const head = make("th", { scope: "col", className: "digits" in column ? "num" : "" });
      head.append(button(column.title, () => sort(column, head)));
      return head;
    });
    const [body, words] = [make("tbody"), make("output")];
    const [earlier, later] = [button("← Back", () => draw(first - ROWS)), button("More →", () => draw(first + ROWS))];
    const controls = [["Find", search], ...choosers.map(([column, select]) => [column.title, select])];
    for (const [, control] of controls) control.addEventListener("input", filter);
    const labels = controls.map(([title, control]) => make("label", {}, `${title} `, control));
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body);
    const scroll = make("div", { className: "scroll stacks", role: "region", tabIndex: 0, ariaLabel: caption }, table);
    place.append(make("div", { className: "tools" }, ...labels), scroll, make("div", { className: "tools" }, earlier, words, later));
    place.hidden = false;
    draw(0);
  }

  for (const place of document.querySelectorAll(".image-list")) list(place);
})();
