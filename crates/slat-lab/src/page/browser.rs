//! Whether a browser shows the page.
//!
//! Without one on this machine nothing is checked, and that is said. `SLAT_BROWSER` names one that must be there, and
//! `SLAT_REPORT` a page to show instead of a small one.

use std::env;
use std::fs::{self, File};
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

use plotters::style::RGBColor;

use super::colour::{BLUE, GREEN, ORANGE, PINK, SKY, STEEL, VERMILION};
use super::{figures, page};
use crate::repro::{self, Scale, Section};

/// Far more than a browser takes for a page, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// What is removed when a test ends.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Directory {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("slat-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

/// Small, and run once.
fn sections() -> &'static [Section] {
    static SECTIONS: OnceLock<Vec<Section>> = OnceLock::new();
    SECTIONS.get_or_init(|| repro::all(Scale::TINY).unwrap())
}

fn browser() -> Option<PathBuf> {
    if let Some(named) = env::var_os("SLAT_BROWSER") {
        return Some(named.into());
    }
    let path = env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let files = env::split_paths(&path).flat_map(|at| names.map(|name| at.join(name)));
    { files }.find(|file| file.is_file())
}

/// What the browser prints when it is asked to do `what` with a page.
fn ask(browser: &Path, home: &Path, what: &[&str], page: &Path) -> String {
    let printed = home.join("printed");
    let mut child = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
        .arg(format!("--user-data-dir={}", home.join("profile").display()))
        .args(what)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .stdout(File::create(&printed).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", browser.display()));
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("{} does not end", browser.display());
        }
        sleep(Duration::from_millis(50));
    };
    assert!(status.success(), "{}: {status}", browser.display());
    fs::read_to_string(printed).unwrap()
}

/// How many points of a picture have a colour.
fn count(picture: &Path, colour: RGBColor) -> usize {
    let decoder = png::Decoder::new(BufReader::new(File::open(picture).unwrap()));
    let mut reader = decoder.read_info().unwrap();
    let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut bytes).unwrap();
    let points = bytes[..info.buffer_size()].chunks_exact(info.color_type.samples());
    points.filter(|point| point[..3] == [colour.0, colour.1, colour.2]).count()
}

#[test]
fn a_browser_shows_every_plot() {
    let Some(browser) = browser() else {
        // Past what keeps the output of tests that pass.
        let _ = io::stderr().write_all(b"NOT CHECKED: there is no chromium to show the page\n");
        return;
    };
    let home = Directory::new("browser");
    let shown = match env::var_os("SLAT_REPORT") {
        Some(path) => fs::canonicalize(path).unwrap(),
        None => {
            let path = home.0.join("page.html");
            fs::write(&path, page(sections(), &figures::of(sections()).unwrap())).unwrap();
            path
        }
    };
    let document = ask(&browser, &home.0, &["--dump-dom"], &shown);
    for version in ["rfc", "v5"] {
        for pass in ["dirty", "populate"] {
            let curves = plot(&document, &format!("parallel-faults-{version}-{pass}"));
            // Lines of two old designs and slat's two bounds; of the old ones, seven published figures each.
            assert!(curves.matches("<polyline").count() >= 4 && curves.contains("<polygon"));
            assert_eq!(curves.matches("<circle").count(), 2 * 7 + 1);
            assert!(curves.contains("\nlinux-5.18+parallel\n") && curves.contains("\nslat\n"));
            let bars = plot(&document, &format!("parallel-faults-{version}-{pass}-time"));
            assert!(bars.matches("<rect").count() > 8 + 4 * 4);
            assert_eq!(bars.matches("\n48 vCPUs\n").count(), 4);
        }
    }
    let picture = home.0.join("page.png");
    let what = [&format!("--screenshot={}", picture.display()), "--window-size=1400,6000"];
    ask(&browser, &home.0, &what, &shown);
    for colour in [VERMILION, BLUE, GREEN, ORANGE, SKY, PINK, STEEL] {
        assert!(count(&picture, colour) > 500, "{colour:?} is not to be seen");
    }
}

/// A plot in the document that the browser has made of the page.
fn plot<'a>(document: &'a str, name: &str) -> &'a str {
    let begin = format!("<figure id=\"{name}\">");
    let (_, rest) = document.split_once(&begin).unwrap_or_else(|| panic!("no plot {name}"));
    let (plot, _) = rest.split_once("</figure>").unwrap();
    assert!(plot.contains("<svg") && plot.contains("<title>") && plot.contains("</svg>"), "{plot}");
    plot
}

#[test]
fn the_page_needs_nothing_from_elsewhere() {
    let text = page(sections(), &figures::of(sections()).unwrap());
    assert!(text.contains("content=\"slat report\""));
    for elsewhere in ["<script", "<link", "<img", "@import", "url(", " src=", "href=\"http"] {
        assert!(!text.contains(elsewhere), "{elsewhere}");
    }
    let cells = sections().iter().flat_map(|section| &section.cells);
    for cell in cells.filter(|cell| !cell.note.is_empty()) {
        assert!(text.contains(&cell.note), "{cell:?}");
    }
    assert!(text.contains(&repro::verdict(sections())));
}
