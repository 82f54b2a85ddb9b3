// A field above the catalogue of guards that hides the rows without a word of it.
document.addEventListener("DOMContentLoaded", () => {
  if (!document.getElementById("the-catalogue-of-guards")) return;
  for (const table of document.querySelectorAll("article table")) {
    const field = document.createElement("input");
    const rows = [...table.tBodies[0].rows];
    field.type = "search";
    field.className = "row-filter";
    field.setAttribute("aria-label", "Filter the rows of this table");
    field.placeholder = `filter ${rows.length} rows: cross_entropy, x[i], scatter …`;
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    (table.closest(".table-wrapper") || table).before(field);
  }
});
