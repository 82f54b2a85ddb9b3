// Code that breaks only between words, tables as lists on a phone, a filter for the catalogue of guards.
document.addEventListener("DOMContentLoaded", () => {
  for (const word of document.querySelectorAll("code.literal .pre")) {
    const text = word.textContent;
    word.classList.toggle("is-whole", text.length <= 20);
    if (text.length <= 20) continue;
    const parts = text.split(/(?<=\w[.(=_\/:])(?=\w)/);
    word.replaceChildren(...parts.flatMap((part, at) => (at ? [document.createElement("wbr"), part] : [part])));
  }
  for (const table of document.querySelectorAll("article table.docutils")) {
    const heads = [...(table.tHead?.rows[0]?.cells ?? [])].map((cell) => cell.textContent.trim());
    // Two columns fit on a phone, and numbers in many columns are compared side by side.
    if (heads.length < 3 || heads.length > 5) continue;
    table.classList.add("is-list");
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, at) => {
        if (heads[at]) cell.dataset.head = heads[at];
        cell.classList.toggle("is-empty", !cell.textContent.trim());
      });
    }
  }
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
