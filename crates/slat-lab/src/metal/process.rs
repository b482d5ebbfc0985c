//! A program that says on its console how far it is: heard line by line, within a time limit, and never left behind.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level};

/// How soon a signal is seen.
const TICK: Duration = Duration::from_millis(50);
/// Last lines that are remembered for an error.
const TAIL: usize = 12;
/// More than any line has; what is longer is cut there.
const LONGEST: u64 = 16 << 20;
/// Lines that wait to be heard.
const WAITING: usize = 256;

/// What a line means to whoever listens.
pub(super) enum Heard<R> {
    /// Nothing that ends the run.
    Chatter,
    /// The same, and nothing that explains an end without a result.
    Quiet,
    /// The program is to be told this.
    Answer(String),
    /// The result.
    Result(R),
    /// Why there is none.
    Failed(String),
}

/// Why there is no result, with the last lines.
#[derive(Debug)]
pub(super) struct Broken {
    pub(super) why: String,
    pub(super) tail: Vec<String>,
}

/// Runs a program until it has said its result, for `limit` at most. Whatever happens, it is gone afterwards; if a signal
/// asks this process to end meanwhile, it ends by that signal.
///
/// # Errors
/// [`Broken`]: it did not start, said that it failed, ended without a result, or took too long.
pub(super) fn follow<R>(
    command: &mut Command,
    limit: Duration,
    mut hear: impl FnMut(&str) -> Heard<R>,
) -> Result<R, Broken> {
    let signals = Signals::watch();
    let mut tail = Tail::default();
    let followed = (|| {
        let (mut child, lines) = start(command)?;
        let deadline = Instant::now() + limit;
        loop {
            if signals.came() {
                return Err("interrupted".to_owned());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let limit = limit.as_secs_f64();
                return Err(format!("not ready after {limit} s, and killed"));
            }
            match lines.recv_timeout(left.min(TICK)) {
                Ok(line) => match hear(&line) {
                    Heard::Chatter => tail.push(line),
                    Heard::Quiet => {}
                    Heard::Answer(line) => child.tell(&line)?,
                    Heard::Result(said) => return Ok(said),
                    Heard::Failed(why) => return Err(why),
                },
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(match child.ended(deadline) {
                        Some(status) => format!("ended without a result ({status})"),
                        None => "closed its console without a result, and was killed".to_owned(),
                    });
                }
            }
        }
    })();
    // The program is gone: whoever asked this one to end may have it now.
    signals.obey();
    followed.map_err(|why| Broken { why, tail: tail.0.into() })
}

/// A process that ends with this.
struct Leashed(Child);

impl Leashed {
    /// Types a line.
    fn tell(&mut self, line: &str) -> Result<(), String> {
        let Some(console) = &mut self.0.stdin else { return Ok(()) };
        let told = writeln!(console, "{line}").and_then(|()| console.flush());
        told.map_err(|error| format!("it cannot be told \"{line}\": {error}"))
    }

    /// With which status it has ended by `deadline`.
    fn ended(&mut self, deadline: Instant) -> Option<ExitStatus> {
        loop {
            match self.0.try_wait() {
                Ok(None) if Instant::now() < deadline => thread::sleep(TICK / 5),
                Ok(status) => return status,
                Err(_) => return None,
            }
        }
    }
}

impl Drop for Leashed {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts it, out of reach of the terminal's own signals, with all that it says as lines.
fn start(command: &mut Command) -> Result<(Leashed, Receiver<String>), String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let program = command.get_program().to_string_lossy().into_owned();
    let child = command.spawn().map_err(|error| format!("{program} did not start: {error}"))?;
    let mut child = Leashed(child);
    let (sender, lines) = mpsc::sync_channel(WAITING);
    let no_thread = |error: std::io::Error| format!("no thread to listen to {program}: {error}");
    if let Some(out) = child.0.stdout.take() {
        listen(out, sender.clone()).map_err(no_thread)?;
    }
    if let Some(err) = child.0.stderr.take() {
        listen(err, sender).map_err(no_thread)?;
    }
    Ok((child, lines))
}

/// Sends on what `from` says, until it is closed or nobody wants to know.
fn listen(from: impl Read + Send + 'static, to: SyncSender<String>) -> std::io::Result<()> {
    let listener = move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        while let Ok(1..) = from.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
            let text = String::from_utf8_lossy(&line);
            if to.send(text.trim_end().to_owned()).is_err() {
                break;
            }
            line.clear();
        }
    };
    thread::Builder::new().name("console".to_owned()).spawn(listener).map(drop)
}

#[derive(Default)]
struct Tail(VecDeque<String>);

impl Tail {
    fn push(&mut self, line: String) {
        if line.is_empty() {
            return;
        }
        if self.0.len() == TAIL {
            self.0.pop_front();
        }
        self.0.push_back(line);
    }
}

/// The signals that ask this process to end, kept until the program is gone.
struct Signals {
    /// The last one, 0 if none came.
    came: Arc<AtomicUsize>,
    /// They do what they always do.
    usual: Arc<AtomicBool>,
}

impl Signals {
    fn watch() -> Self {
        let signals = Self { came: Arc::default(), usual: Arc::default() };
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            let number = usize::try_from(signal).unwrap_or_default();
            // Where it cannot be watched it ends this process at once, as ever.
            let _ = flag::register_conditional_default(signal, Arc::clone(&signals.usual));
            let _ = flag::register_usize(signal, Arc::clone(&signals.came), number);
        }
        signals
    }

    fn came(&self) -> bool {
        self.came.load(Ordering::SeqCst) != 0
    }

    fn obey(&self) {
        if let signal @ 1.. = self.came.load(Ordering::SeqCst) {
            let _ = low_level::emulate_default_handler(signal as i32);
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.usual.store(true, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn hear(line: &str) -> Heard<String> {
        match line.split_once(' ') {
            Some(("result", said)) => Heard::Result(said.to_owned()),
            Some(("failed", why)) => Heard::Failed(why.to_owned()),
            _ => Heard::Chatter,
        }
    }

    const LONG: Duration = Duration::from_secs(60);

    #[track_caller]
    fn broken(script: &str, limit: Duration) -> Broken {
        follow(&mut shell(script), limit, hear).unwrap_err()
    }

    #[test]
    fn a_result_is_one_whatever_is_said_before_and_however_the_program_goes_on() {
        let script = "echo booting; echo result 7; exec sleep 600";
        assert_eq!(follow(&mut shell(script), LONG, hear).unwrap(), "7");
        let script = "printf 'result \\377\\r\\n'";
        assert_eq!(follow(&mut shell(script), LONG, hear).unwrap(), "\u{fffd}");
        let script = "echo result without an end of the line | tr -d '\\n'";
        assert!(follow(&mut shell(script), LONG, hear).is_ok());
    }

    #[test]
    fn a_program_that_asks_is_answered() {
        let heard = follow(&mut shell("echo who; read name; echo result $name"), LONG, |line| {
            if line == "who" { Heard::Answer("slat".to_owned()) } else { hear(line) }
        });
        assert_eq!(heard.unwrap(), "slat");
    }

    #[test]
    fn a_failure_is_the_reason() {
        let broken = broken("echo one; echo failed cpu 1: no; exec sleep 600", LONG);
        assert_eq!((broken.why.as_str(), &broken.tail[..]), ("cpu 1: no", &["one".to_owned()][..]));
    }

    #[test]
    fn what_ends_without_a_result_is_told_with_its_last_lines() {
        let told = broken("seq 1 40; exit 3", LONG);
        assert!(told.why.contains("without a result") && told.why.contains('3'), "{told:?}");
        assert_eq!((told.tail.len(), told.tail.last().map(String::as_str)), (TAIL, Some("40")));
        let told = broken("echo no such CPU >&2; exit 3", LONG);
        assert_eq!(told.tail, ["no such CPU"]);
        let missing = follow(&mut Command::new("/no/such/program"), LONG, hear).unwrap_err();
        assert!(missing.why.contains("did not start"), "{missing:?}");
    }

    #[test]
    fn what_takes_too_long_is_killed_though_it_talks() {
        let limit = Duration::from_millis(300);
        for script in ["echo $$; exec sleep 600", "echo $$; while :; do echo y; done"] {
            let mut pid = None;
            let broken = follow(&mut shell(script), limit, |line| {
                pid = pid.take().or_else(|| line.parse::<u32>().ok());
                hear(line)
            });
            assert!(broken.unwrap_err().why.contains("killed"));
            let pid = pid.unwrap();
            let alive = Command::new("kill").args(["-0", &pid.to_string()]).output().unwrap();
            assert!(!alive.status.success(), "{pid} goes on");
        }
    }
}
