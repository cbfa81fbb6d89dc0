// What the theme leaves out: the level of headings in the sidebar, and scrolling by keyboard.
document.addEventListener("DOMContentLoaded", () => {
    for (const caption of document.querySelectorAll('.caption[role="heading"]')) {
        caption.setAttribute("aria-level", "2");
    }
    for (const block of document.querySelectorAll("pre, .table-wrapper")) {
        if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
    }
});
