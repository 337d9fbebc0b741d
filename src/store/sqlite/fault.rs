//! Turns the reason why a request failed into an error for the caller.

use std::time::Duration;

use rusqlite::ErrorCode;

use super::file::LOCKED;
use crate::{clock::Boottime, store::Error};

/// Why a request failed.
pub(crate) enum Fault {
    Sql(rusqlite::Error),
    /// The stored data is not in the expected form.
    Data(String),
}

impl From<rusqlite::Error> for Fault {
    fn from(e: rusqlite::Error) -> Self {
        Self::Sql(e)
    }
}

impl Fault {
    pub(crate) fn at(self, address: &str) -> Error {
        let address = address.to_owned();
        let e = match self {
            Self::Data(reason) => return Error::Corrupt { address, reason },
            Self::Sql(e) => e,
        };
        let refused = |reason: String| Error::Refused {
            address: address.clone(),
            reason,
        };
        match e.sqlite_error_code() {
            Some(
                ErrorCode::DatabaseBusy
                | ErrorCode::DatabaseLocked
                | ErrorCode::FileLockingProtocolFailed,
            ) => Error::Unreachable {
                reason: format!(
                    "another process has held the lock for writing for longer than {:.1?}; `fuser {}` names those that \
                     use the file: end that process, or let it go on if it is stopped (kill -CONT)",
                    LOCKED
                        .get()
                        .map_or(Duration::ZERO, |since| Boottime::now().since(since)),
                    address.trim_start_matches("sqlite:")
                ),
                address,
            },
            Some(ErrorCode::DiskFull) => {
                refused(format!("the disk is full; free some space ({e})"))
            }
            Some(
                ErrorCode::ReadOnly
                | ErrorCode::PermissionDenied
                | ErrorCode::CannotOpen
                | ErrorCode::AuthorizationForStatementDenied,
            ) => refused(format!(
                "it cannot be written; the file and its directory must be writable for the user that soloist \
                 runs as ({e})"
            )),
            // It is unknown whether the transaction reached the disk.
            Some(ErrorCode::SystemIoFailure) => Error::Unreachable {
                reason: format!("the disk failed ({e})"),
                address,
            },
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Error::Corrupt {
                reason: format!(
                    "the file is damaged, or not a database; restore it, or move it away so that soloist creates a \
                     new one ({e})"
                ),
                address,
            },
            // A value has a type that soloist does not write there.
            None if !matches!(e, rusqlite::Error::SqliteFailure(..)) => Error::Corrupt {
                reason: e.to_string(),
                address,
            },
            _ => refused(e.to_string()),
        }
    }
}
