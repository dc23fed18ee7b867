//! How often two processes have lost contact, and what each has heard in the present one. Without IO.

/// The numbers of one side of a contact. See [`crate::wire::contact`].
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Numbers {
    /// How often contact was lost before, as far as either side has said. It names the contact.
    pub contact: u64,
    /// The number of the next batch of the other side.
    pub heard: u64,
    /// Whether there was a connection. Before that nothing can have been heard, and the end of a contact is no loss.
    pub was_connected: bool,
}

/// What is to be done with a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Receipt {
    TakeIn,
    /// It was taken in before.
    Again,
    /// It is of a contact that is over, which the other side does not know yet. It is not answered: it is not taken in.
    Stale,
    /// The other side has lost this contact.
    Lost(u64),
}

impl Numbers {
    /// After so many losses.
    pub(crate) fn after(contact: u64) -> Numbers {
        Numbers { contact, ..Numbers::default() }
    }

    /// A batch of the other side has come.
    pub(crate) fn hear(&mut self, contact: u64, batch: u64) -> Receipt {
        if contact > self.contact {
            return Receipt::Lost(self.contact);
        }
        if contact < self.contact {
            return Receipt::Stale;
        }
        if batch < self.heard {
            return Receipt::Again;
        }
        self.heard = batch + 1;
        // It may have come over a connection that ended with the contact before.
        self.was_connected = true;
        Receipt::TakeIn
    }

    /// The next contact, if this one is lost now.
    pub(crate) fn next(&self) -> u64 {
        self.contact + u64::from(self.was_connected)
    }
}
