//! What a person sees while a run takes long: a bar on a terminal, nothing anywhere else.

use std::io::{self, IsTerminal};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The bar, or nothing.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar for `accesses` in all. It is drawn on standard error, if that and standard output are terminals.
    pub(crate) fn new(accesses: u64) -> Self {
        let seen = io::stderr().is_terminal() && io::stdout().is_terminal();
        let target = if seen { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(accesses), target);
        let style =
            ProgressStyle::with_template("{spinner} {msg:24} {wide_bar} {percent:>3}% {elapsed}");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        if seen {
            bar.enable_steady_tick(Duration::from_millis(100));
        }
        Self { bar }
    }

    /// Names what goes on now.
    pub(crate) fn phase(&self, name: &str, iteration: Option<u32>) {
        if !self.bar.is_hidden() {
            self.bar.set_message(match iteration {
                Some(iteration) => format!("{name} {iteration}"),
                None => name.to_owned(),
            });
        }
    }

    /// How many accesses were made.
    pub(crate) fn set(&self, accesses: u64) {
        self.bar.set_position(accesses);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
