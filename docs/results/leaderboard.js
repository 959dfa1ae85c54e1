// The leaderboard: filters above its tables, and headers that sort. Without this script the tables are as they are.
(() => {
  const tables = [...document.querySelectorAll(".claims table")];
  const bar = document.querySelector(".claim-filters");
  if (!tables.length || !bar) return;

  const heads = [...tables[0].tHead.rows[0].cells].map((cell) => cell.textContent);
  const gridOf = (row) => row.closest(".claims").dataset.grid;
  const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
  const text = (row, head) => row.cells[heads.indexOf(head)].textContent;
  const values = {
    Data: (row) => text(row, "Data"),
    Patch: (row) => text(row, "Patch"),
    Grid: gridOf,
    Threat: (row) => text(row, "Threat"),
    Evidence: (row) => text(row, "Evidence").split(/[,:]/)[0],
  };

  const selects = Object.entries(values).map(([name, value]) => {
    const label = document.createElement("label");
    const select = document.createElement("select");
    const options = [...new Set(rows.map(value))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    select.append(new Option("all", ""), ...options.map((option) => new Option(option, option)));
    select.addEventListener("change", show);
    label.append(`${name} `, select);
    bar.append(label);
    return { select, value };
  });
  const count = document.createElement("output");
  bar.append(count);

  const FEW = 10; // rows of a table before its button is pressed

  function show() {
    const wanted = selects.filter(({ select }) => select.value);
    let matches = 0;
    for (const table of tables) {
      const block = table.closest(".claims");
      const fits = [...table.tBodies[0].rows].filter((row) => wanted.every((w) => w.value(row) === w.select.value));
      const shown = new Set(block.dataset.all ? fits : fits.slice(0, FEW));
      for (const row of table.tBodies[0].rows) row.hidden = !shown.has(row);
      block.hidden = !fits.length;
      block.previousElementSibling.hidden = block.hidden; // its heading
      const more = block.querySelector(".more");
      more.hidden = shown.size === fits.length;
      more.textContent = `all ${fits.length} claims`;
      matches += fits.length;
    }
    count.textContent = `${matches} of ${rows.length} claims`;
  }

  function number(cell) {
    const digits = cell.textContent.replace(/,/g, "").match(/^\d+(\.\d+)?/);
    return digits ? Number(digits[0]) : NaN;
  }

  function sort(table, column) {
    const head = table.tHead.rows[0].cells[column];
    const down = head.getAttribute("aria-sort") !== "descending";
    for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const numeric = ["Certified, %", "Clean, %", "Images", "Cost"].includes(heads[column]);
    const order = (a, b) => {
      const [left, right] = [a.cells[column], b.cells[column]];
      if (!numeric) return left.textContent.localeCompare(right.textContent, "en", { numeric: true });
      const [x, y] = [number(left), number(right)];
      return Number.isNaN(x) ? (down ? -1 : 1) : Number.isNaN(y) ? (down ? 1 : -1) : x - y; // unknown comes last
    };
    const sorted = [...table.tBodies[0].rows].sort((a, b) => (down ? order(b, a) : order(a, b)));
    table.tBodies[0].append(...sorted);
    show();
  }

  for (const table of tables) {
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      const button = document.createElement("button");
      button.append(...cell.childNodes);
      button.addEventListener("click", () => sort(table, column));
      cell.append(button);
    });
  }
  for (const row of rows) [...row.cells].forEach((cell, column) => (cell.dataset.head = heads[column]));
  for (const table of tables) {
    const block = table.closest(".claims");
    const more = document.createElement("button");
    more.className = "more md-button";
    more.addEventListener("click", () => { block.dataset.all = "yes"; show(); });
    block.append(more);
    table.dataset.labelled = "yes";
  }
  bar.hidden = false;
  show();
})();
