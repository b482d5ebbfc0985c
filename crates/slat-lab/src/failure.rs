//! How a run can go wrong, and with which status the command then ends.

use std::io;
use std::process::ExitCode;

use slat_vm::{InvalidateError, SlotError};

/// Why there is no clean result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// What was asked for makes no sense, or cannot be had here.
    #[error("{0}")]
    Usage(String),
    /// This computer cannot do it.
    #[error("{0}")]
    Missing(String),
    /// The run broke off.
    #[error("{0}")]
    Run(String),
    /// A check found something; the report says what.
    #[error("the check failed")]
    Check,
    /// The result could not be written.
    #[error("cannot write the result: {0}")]
    Output(#[from] io::Error),
}

impl Failure {
    /// 2 for what the user can put right on the command line, 4 for what this computer cannot do, 1 for everything else.
    pub(crate) fn status(&self) -> ExitCode {
        match self {
            Self::Usage(_) => ExitCode::from(2),
            Self::Missing(_) => ExitCode::from(4),
            Self::Run(_) | Self::Check | Self::Output(_) => ExitCode::FAILURE,
        }
    }

    /// Whether the reader of our output has just gone away, which is no news to anybody.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

impl From<SlotError> for Failure {
    fn from(error: SlotError) -> Self {
        Self::Run(format!("a memslot: {error}"))
    }
}

impl From<InvalidateError> for Failure {
    fn from(error: InvalidateError) -> Self {
        Self::Run(format!("an invalidation by the host: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_command_line_is_the_users_fault() {
        let status = |failure: &Failure| format!("{:?}", failure.status());
        let is = |code: u8| format!("{:?}", ExitCode::from(code));
        assert_eq!(status(&Failure::Usage(String::new())), is(2));
        assert_eq!(status(&Failure::Missing(String::new())), is(4));
        assert_eq!(status(&Failure::Run(String::new())), is(1));
        assert_eq!(status(&Failure::Check), is(1));
        let closed = Failure::Output(io::ErrorKind::BrokenPipe.into());
        assert_eq!(status(&closed), is(1));
        assert!(closed.is_closed_pipe() && !Failure::Check.is_closed_pipe());
    }
}
