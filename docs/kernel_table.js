// Shows the rows of kernel_rows.js, which .ci/docs_site.py writes from the data, as a table with a search field.
(() => {
  const place = document.getElementById("kernels");
  const names = Object.keys(KERNEL_ROWS[0]);
  const element = (tag, text, parent) => {
    const made = document.createElement(tag);
    made.textContent = text;
    parent.append(made);
    return made;
  };
  const text = (row) => names.map((name) => row[name] ?? "-").join(" ").toLowerCase();
  place.textContent = "";
  const search = element("input", "", place);
  search.type = "search";
  search.placeholder = "all of these words, for example: sm_90 fp8 list 3.9";
  search.style.width = "100%";
  const count = element("p", "", place);
  const table = element("table", "", place);
  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/);
    const rows = KERNEL_ROWS.filter((row) => words.every((word) => text(row).includes(word)));
    count.textContent = `${rows.length} of ${KERNEL_ROWS.length} rows`;
    table.textContent = "";
    const head = element("tr", "", element("thead", "", table));
    names.forEach((name) => element("th", name, head));
    const body = element("tbody", "", table);
    for (const row of rows) {
      const line = element("tr", "", body);
      names.forEach((name) => element("td", row[name] ?? "-", line));
    }
  };
  search.addEventListener("input", show);
  show();
})();
