//! Choices a user makes about data: layout, trained tokens, over-length documents.

use serde::{Deserialize, Serialize};

/// Layout of the rows of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayoutChoice {
    /// Found from the columns.
    #[default]
    Auto,
    /// `messages` (or `conversations`): a list of {role, content}.
    Messages,
    /// `instruction`, `input`, `output`.
    Alpaca,
    /// `prompt`, `completion`.
    PromptCompletion,
    /// `question`, `answer`.
    QuestionAnswer,
    /// `text`, or a plain text file.
    Text,
    /// Columns named in `fields`.
    Mapping,
}

/// Which tokens are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainOn {
    /// Every assistant turn.
    #[default]
    Assistant,
    /// The last assistant turn.
    LastTurn,
    /// Every token.
    Everything,
}

/// What happens to a document longer than `pack_len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overlong {
    /// Cut at `pack_len`.
    #[default]
    Truncate,
    /// Cut into several documents.
    Split,
    /// Left out.
    Drop,
}
