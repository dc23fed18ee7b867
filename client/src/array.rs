//! Arrays of the crate `ndarray` as values.

use std::fmt;

use ndarray::{Array, ArrayView, Dimension, IxDyn};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use wingbeat_core::Buffer;
use wingbeat_core::codec::Plain;

/// An array that can stand in a value as a [`Buffer`] does: its elements go into shared memory, and are read there.
///
/// Made from an `Array` without a copy, if its elements lie in their order (C order), and read as an `ArrayView`. Feature
/// `ndarray`.
///
/// ```no_run
/// # async fn run() -> wingbeat::Result<()> {
/// use ndarray::{Array2, Ix2};
/// use wingbeat::ArrayBuffer;
///
/// #[wingbeat::remote]
/// fn trace(matrix: ArrayBuffer<f64, Ix2>) -> f64 {
///     matrix.view().diag().sum()
/// }
///
/// let matrix = wingbeat::put(&ArrayBuffer::from(Array2::<f64>::eye(4096)))?;
/// assert_eq!(trace::remote(&matrix).get().await?, 4096.0);
/// # Ok(())
/// # }
/// ```
pub struct ArrayBuffer<T, D = IxDyn> {
    /// Of as many elements as there are.
    shape: D,
    elements: Buffer<T>,
}

/// What is sent.
#[derive(Serialize, Deserialize)]
#[serde(bound(serialize = "T: Plain + Serialize", deserialize = "T: Plain + Deserialize<'de>"))]
struct Parts<T> {
    shape: Vec<u64>,
    elements: Buffer<T>,
}

impl<T: Plain, D: Dimension> ArrayBuffer<T, D> {
    /// The lengths of the axes.
    pub fn shape(&self) -> &[usize] {
        self.shape.slice()
    }

    /// The elements, in C order.
    pub fn elements(&self) -> &Buffer<T> {
        &self.elements
    }

    /// The array, read where it lies.
    ///
    /// ```
    /// # use wingbeat::ArrayBuffer;
    /// let buffer = ArrayBuffer::from(ndarray::array![[1, 2], [3, 4]]);
    /// assert_eq!(buffer.view()[(1, 0)], 3);
    /// ```
    #[allow(clippy::expect_used, reason = "the shape was compared with the elements when the buffer was made")]
    pub fn view(&self) -> ArrayView<'_, T, D> {
        ArrayView::from_shape(self.shape.clone(), &self.elements).expect("the shape fits the elements")
    }

    /// An array of its own. Copies the elements if others share them, or they lie in shared memory.
    #[allow(clippy::expect_used, reason = "as in `view`")]
    pub fn into_array(self) -> Array<T, D> {
        Array::from_shape_vec(self.shape, self.elements.into_vec()).expect("the shape fits the elements")
    }
}

/// Without a copy, if the elements lie in C order.
impl<T: Plain, D: Dimension> From<Array<T, D>> for ArrayBuffer<T, D> {
    fn from(array: Array<T, D>) -> Self {
        let shape = array.raw_dim();
        let is_whole = array.is_standard_layout();
        if !is_whole {
            return ArrayBuffer { shape, elements: array.iter().copied().collect() };
        }
        let len = array.len();
        let (mut elements, start) = array.into_raw_vec_and_offset();
        // A part of what was a larger array before it was sliced.
        elements.drain(..start.unwrap_or(0));
        elements.truncate(len);
        ArrayBuffer { shape, elements: elements.into() }
    }
}

impl<T, D: Clone> Clone for ArrayBuffer<T, D> {
    fn clone(&self) -> Self {
        ArrayBuffer { shape: self.shape.clone(), elements: self.elements.clone() }
    }
}

impl<T: Plain + PartialEq, D: Dimension> PartialEq for ArrayBuffer<T, D> {
    fn eq(&self, other: &Self) -> bool {
        self.shape == other.shape && self.elements == other.elements
    }
}

impl<T: Plain + fmt::Debug, D: Dimension> fmt::Debug for ArrayBuffer<T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of shape {:?}", self.elements, self.shape())
    }
}

impl<T: Plain + Serialize, D: Dimension> Serialize for ArrayBuffer<T, D> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let shape = self.shape().iter().map(|length| *length as u64).collect();
        Parts { shape, elements: self.elements.clone() }.serialize(serializer)
    }
}

impl<'de, T: Plain + Deserialize<'de>, D: Dimension> Deserialize<'de> for ArrayBuffer<T, D> {
    fn deserialize<R: Deserializer<'de>>(deserializer: R) -> Result<Self, R::Error> {
        let Parts { shape, elements } = Parts::<T>::deserialize(deserializer)?;
        let lengths: Vec<usize> = shape.iter().map(|length| *length as usize).collect();
        let of_elements = || format!("an array of shape {lengths:?} cannot have {} elements", elements.len());
        // Also that the product of the lengths is a number.
        let fits = ArrayView::from_shape(IxDyn(&lengths), &elements).is_ok_and(|view| view.len() == elements.len());
        if !fits {
            return Err(de::Error::custom(of_elements()));
        }
        let of_axes = || {
            let wanted = D::NDIM.unwrap_or_default();
            format!("an array of shape {lengths:?} is none of {wanted} axes")
        };
        let shape = D::from_dimension(&IxDyn(&lengths)).ok_or_else(|| de::Error::custom(of_axes()))?;
        Ok(ArrayBuffer { shape, elements })
    }
}
