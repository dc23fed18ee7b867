//! A parameter server: workers compute gradients of a linear regression on their own data, and push them to one actor
//! whenever they are ready.

use anyhow::{Result, ensure};
use wingbeat::get_all;

const FEATURES: usize = 8;
const SAMPLES: usize = 2_000;
const WORKERS: u64 = 2;
const STEPS: u32 = 60;

/// What the data was made with; the server must find it.
const TRUTH: [f64; FEATURES] = [1.0, -2.0, 3.0, 0.5, -1.5, 2.5, 0.0, -0.5];

struct Server {
    weights: Vec<f64>,
    pushes: u64,
}

#[wingbeat::actor]
impl Server {
    fn new() -> Self {
        Server { weights: vec![0.0; FEATURES], pushes: 0 }
    }

    /// Takes a gradient in, and answers with the weights as they are now.
    fn push(&mut self, gradient: Vec<f64>, rate: f64) -> Vec<f64> {
        for (weight, slope) in self.weights.iter_mut().zip(&gradient) {
            *weight -= rate * slope;
        }
        self.pushes += 1;
        self.weights.clone()
    }

    fn weights(&self) -> Vec<f64> {
        self.weights.clone()
    }

    fn pushes(&self) -> u64 {
        self.pushes
    }
}

struct Worker {
    rows: Vec<([f64; FEATURES], f64)>,
    server: ServerHandle,
}

#[wingbeat::actor]
impl Worker {
    fn new(seed: u64, server: ServerHandle) -> Self {
        Worker { rows: generate(seed), server }
    }

    /// Computes gradients and pushes them, one after another; answers with the loss at the end.
    fn train(&mut self, steps: u32) -> Result<f64, String> {
        let mut weights = self.server.weights().get_blocking().map_err(|error| error.to_string())?;
        for _ in 0..steps {
            let (_, gradient) = self.loss_and_gradient(&weights);
            weights = self.server.push(gradient, 0.1).get_blocking().map_err(|error| error.to_string())?;
        }
        Ok(self.loss_and_gradient(&weights).0)
    }

    fn loss(&self, weights: Vec<f64>) -> f64 {
        self.loss_and_gradient(&weights).0
    }
}

impl Worker {
    fn loss_and_gradient(&self, weights: &[f64]) -> (f64, Vec<f64>) {
        let mut gradient = vec![0.0; FEATURES];
        let mut loss = 0.0;
        for (row, target) in &self.rows {
            let error = row.iter().zip(weights).map(|(x, w)| x * w).sum::<f64>() - target;
            loss += error * error;
            for (slope, x) in gradient.iter_mut().zip(row) {
                *slope += 2.0 * error * x;
            }
        }
        let count = self.rows.len() as f64;
        gradient.iter_mut().for_each(|slope| *slope /= count);
        (loss / count, gradient)
    }
}

/// Rows of features between -1 and 1, with what [`TRUTH`] makes of them.
fn generate(seed: u64) -> Vec<([f64; FEATURES], f64)> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut random = move || {
        // A linear congruential generator with Knuth's MMIX constants.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    let mut row = move || {
        let row: [f64; FEATURES] = std::array::from_fn(|_| random());
        let target = row.iter().zip(TRUTH).map(|(x, w)| x * w).sum();
        (row, target)
    };
    (0..SAMPLES).map(|_| row()).collect()
}

#[wingbeat::main]
async fn main() -> Result<()> {
    wingbeat::init().await?;
    let server = Server::remote();
    let workers: Vec<_> = (0..WORKERS).map(|seed| Worker::remote(seed + 1, server.clone())).collect();
    for round in 1..=4 {
        let losses: Vec<_> = workers.iter().map(|worker| worker.train(STEPS / 4)).collect();
        let losses = get_all(&losses).await?;
        println!("round {round}: losses {losses:.5?}");
    }
    let weights = server.weights().get().await?;
    let last = get_all(&workers.iter().map(|worker| worker.loss(weights.clone())).collect::<Vec<_>>()).await?;
    ensure!(server.pushes().get().await? == WORKERS * u64::from(STEPS), "a push was lost");
    ensure!(last.iter().all(|loss| *loss < 1e-3), "the loss did not fall: {last:?}");
    println!("weights {weights:.3?}");
    println!("parameter_server: ok");
    Ok(())
}
