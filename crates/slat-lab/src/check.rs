//! What `--check` finds: for each workload something of its own, and for all of them what the machine's rule checker saw.

use serde::{Deserialize, Serialize};

/// What one workload compares.
pub(crate) trait Findings: Serialize {
    /// What has been shown if nothing is wrong.
    const CLEAN: &'static str;

    /// What was compared, and how much of it.
    fn compared(&self) -> String;

    /// What must not be: how often it was, and what it is.
    fn wrong(&self) -> Vec<(u64, &'static str)>;

    /// The first that were wrong, if they can be named.
    fn named(&self) -> Option<String> {
        None
    }
}

/// What a workload finds that compares nothing.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Unchecked {}

impl Findings for Unchecked {
    const CLEAN: &'static str = "";

    fn compared(&self) -> String {
        match *self {}
    }

    fn wrong(&self) -> Vec<(u64, &'static str)> {
        match *self {}
    }
}

/// The `check` of a report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Check<F> {
    #[serde(flatten)]
    pub(crate) found: F,
    /// Absent where nobody sees what is done to tables.
    #[serde(flatten)]
    pub(crate) rules: Option<Rules>,
}

/// What the machine's rule checker saw.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Rules {
    /// Rules of the architecture or of the engine's protocol that were broken.
    pub(crate) violations: u64,
    /// The first of them.
    pub(crate) violation: Option<String>,
}

impl Rules {
    /// Adds what another machine's saw.
    pub(crate) fn add(&mut self, other: Self) {
        self.violations += other.violations;
        self.violation = self.violation.take().or(other.violation);
    }
}

impl<F: Findings> Check<F> {
    /// Everything that was found, by kind.
    fn wrong(&self) -> impl Iterator<Item = (u64, &'static str)> {
        let rules = self.rules.iter().map(|rules| (rules.violations, "rules were broken"));
        self.found.wrong().into_iter().chain(rules).filter(|(count, _)| *count > 0)
    }

    /// Whether nothing was found.
    pub(crate) fn is_clean(&self) -> bool {
        self.wrong().next().is_none()
    }

    /// The check in lines for a person.
    pub(crate) fn verdict(&self) -> Vec<String> {
        let mut lines = vec![self.found.compared()];
        if self.is_clean() {
            let rules = if self.rules.is_some() { ", no rule broken" } else { "" };
            lines.push(format!("{}{rules}", F::CLEAN));
        }
        lines.extend(self.wrong().map(|(count, what)| format!("{count} {what}")));
        lines.extend(self.found.named());
        lines.extend(self.rules.as_ref().and_then(|rules| rules.violation.clone()));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Pages {
        lost: u64,
    }

    impl Findings for Pages {
        const CLEAN: &'static str = "nothing lost";

        fn compared(&self) -> String {
            "4 pages".to_owned()
        }

        fn wrong(&self) -> Vec<(u64, &'static str)> {
            vec![(self.lost, "pages were lost"), (0, "pages were found")]
        }

        fn named(&self) -> Option<String> {
            (self.lost > 0).then(|| "the first: 7".to_owned())
        }
    }

    #[test]
    fn the_verdict_names_what_was_found_and_nothing_else() {
        let rules = Some(Rules::default());
        let clean = Check { found: Pages { lost: 0 }, rules: rules.clone() };
        assert_eq!(clean.verdict(), ["4 pages", "nothing lost, no rule broken"]);
        assert!(clean.is_clean());
        let rules = Some(Rules { violations: 1, violation: Some("a rule".to_owned()) });
        let lossy = Check { found: Pages { lost: 2 }, rules };
        let lines =
            ["4 pages", "2 pages were lost", "1 rules were broken", "the first: 7", "a rule"];
        assert_eq!(lossy.verdict(), lines);
        assert!(!lossy.is_clean());
    }

    #[test]
    fn a_broken_rule_is_enough() {
        let rules = Some(Rules { violations: 1, violation: None });
        let broken = Check { found: Pages { lost: 0 }, rules };
        assert!(!broken.is_clean());
    }

    #[test]
    fn what_a_workload_found_stands_beside_the_rules() {
        let check = Check { found: Pages { lost: 2 }, rules: Some(Rules::default()) };
        let json = serde_json::to_value(check).unwrap();
        assert_eq!(json, serde_json::json!({"lost": 2, "violations": 0, "violation": null}));
    }

    #[test]
    fn where_nobody_sees_the_rules_nothing_is_said_of_them() {
        let check = Check { found: Pages { lost: 0 }, rules: None };
        assert_eq!(check.verdict(), ["4 pages", "nothing lost"]);
        let json = serde_json::to_value(check).unwrap();
        assert_eq!(json, serde_json::json!({"lost": 0}));
    }
}
